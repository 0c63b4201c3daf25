// Documents packed into one sequence. Attention does not cross document boundaries and positions restart at 0, so each
// document is computed independently.
//
//   ids         7 3 E 5 6 8 E E 4      E ends a document and belongs to it
//   starts      0 0 0 3 3 3 3 7 8
//   positions   0 1 2 0 1 2 3 0 0
#pragma once
#include <cstdint>

#include "tensor/tensor.h"

namespace tessera {

// With undefined tensors, each sequence is one document from position 0.
struct Documents {
  static constexpr int32_t kPadding = 1 << 30;  // start of a padding token: no token attends to it
  Tensor starts;     // int32 (B, Tq): start of each query's document, as a position in the full sequence
  Tensor positions;  // int32 (B, T): within each token's document
  // Each sequence is one document followed by padding, which attention may process: its outputs are unused.
  bool only_padding = false;
};

// Full sequences: ids int32 (B, T) -> starts and positions, both (B, T), all in host memory.
Documents find_documents(const Tensor& ids, int32_t end);

// starts int32 (B, T), in host memory.
Documents documents_from(const Tensor& starts);

}  // namespace tessera
