// Flat memory: the parameters of one unit (an embedding, a block, a head) lie in one contiguous buffer, their gradients
// in another, so that the optimizer, the gradient norm, buckets and shards each work on long runs of memory.
#pragma once
#include <string>
#include <vector>

#include "nn/parameter.h"
#include "tensor/tensor.h"

namespace tessera {

// The place of a parameter in its unit's buffers.
struct Slot {
  Parameter* parameter = nullptr;
  int64_t begin = 0;  // its first element there; multiples of 16, gaps are zero and stay zero
  int64_t size = 0;   // elements of the part here, or its bytes
  int64_t end() const { return begin + size; }
};

struct NamedTensor {
  std::string name;
  Tensor tensor;
};

// The values and gradients of a unit, or of a shard of one: then a slot may begin before element 0, or end past the
// last. The parameters must outlive it.
struct FlatUnit {
  std::string name;         // "blocks.0"
  Tensor values;            // 1-D: float64, float32 or bfloat16; uint8 of matrices in four bits
  Tensor grads;             // 1-D, as long as values; may be of another floating dtype
  std::vector<Slot> slots;  // in order of begin, not overlapping

  // Of a frozen unit, whose parameters all are, there are no gradients.
  bool trainable() const { return slots.empty() || slots[0].parameter->trainable; }
  // Of matrices that are updated as wholes; a unit has these or others.
  bool matrices() const { return !slots.empty() && slots[0].parameter->whole_update; }
};

}  // namespace tessera
