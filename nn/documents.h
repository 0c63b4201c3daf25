// Documents that lie one after another in a sequence. Attention does not cross them, and in each of them positions
// begin again at 0, so that each is computed as if it were alone.
//
//   ids         7 3 E 5 6 8 E E 4      E ends documents, and belongs to the one that it ends
//   starts      0 0 0 3 3 3 3 7 8
//   positions   0 1 2 0 1 2 3 0 0
#pragma once
#include <cstdint>

#include "tensor/tensor.h"

namespace tessera {

// Of the tokens of a pass; undefined: each sequence is one document, from position 0.
struct Documents {
  Tensor starts;     // int32 (B, Tq): where the document of each query begins, by its position in the whole sequence
  Tensor positions;  // int32 (B, T): of each token within its document
};

// Of whole sequences: ids int32 (B, T) on the host -> both (B, T), there.
Documents documents_of(const Tensor& ids, int32_t end);

// Of starts that are known, int32 (B, T) on the host.
Documents documents_from(const Tensor& starts);

}  // namespace tessera
