// Flat memory: the parameters of one unit (an embedding, a block, a head) lie in one contiguous buffer, their gradients
// in another, so that the optimizer, the gradient norm, buckets and shards each work on long runs of memory.
#pragma once
#include <string>
#include <vector>

#include "nn/cut.h"
#include "tensor/tensor.h"

namespace tessera {

struct Slot {
  std::string name;   // full name of the parameter, "blocks.0.mlp.up.weight"
  int64_t begin = 0;  // first element in the unit's buffers; multiples of 16, gaps are zero and stay zero
  Shape shape;
  bool decay = false;      // weight decay applies (matrices, not biases nor norms)
  Cut cut = {};            // what of the whole parameter this is
  std::string alias = {};  // Parameter::alias
};

// The values and gradients of a unit, or of a shard of one: then a slot may begin before element 0, or end past the
// last.
struct FlatUnit {
  std::string name;         // "blocks.0"
  Tensor values;            // 1-D: float64, float32 or bfloat16
  Tensor grads;             // 1-D, as long as values; may be of another floating dtype
  std::vector<Slot> slots;  // in order of begin, not overlapping
};

}  // namespace tessera
