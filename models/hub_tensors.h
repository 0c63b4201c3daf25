// Tensors of a model as the transformers library names and stores them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "models/language_model.h"

namespace tessera {

// A Tessera tensor: concatenated rows of hub tensors, or one hub tensor transposed.
struct HubTensor {
  struct Slice {
    std::string name;
    int64_t rows = 0;  // of Tessera's tensor
  };
  std::string name;
  Shape shape;
  std::vector<Slice> slices;
  bool transposed = false;  // GPT-2 stores weights as (in, out)

  std::vector<int64_t> slice_shape(const Slice& slice) const;
};

// Modules whose outputs dumps and audits compare; those of a layer follow layer(i).
struct ModuleNames {
  std::string embedding, layers, attention, feed_forward, norm, head = "lm_head";
  std::string layer(int64_t i) const { return layers + "." + std::to_string(i); }
};
ModuleNames module_names(const ModelConfig& config);

// In the order of the model's parameters; a tied head is omitted. Cost: shapes only.
std::vector<HubTensor> hub_tensors(const ModelConfig& config);

}  // namespace tessera
