// Tensors of a model under the names that the transformers library gives them, and how ours are made of theirs.
#pragma once
#include <string>
#include <vector>

#include "models/language_model.h"

namespace tessera {

// One of our tensors: the rows of some of theirs, one after another, or one of theirs transposed.
struct HubTensor {
  struct Piece {
    std::string name;
    int64_t rows = 0;  // of ours
  };
  std::string name;
  Shape shape;
  std::vector<Piece> pieces;
  bool transposed = false;  // GPT-2's layers keep (in, out)

  // Of a piece, as it is stored.
  std::vector<int64_t> shape_of(const Piece& piece) const;
};

// All of a model's, in the order of its parameters; a tied head is not named again. Cost: shapes only.
std::vector<HubTensor> hub_tensors(const ModelConfig& config);

}  // namespace tessera
