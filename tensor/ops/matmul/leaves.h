// Layout-invariant matmuls (docs/layout_invariant.md): the contracted dim is partitioned into leaves, each accumulated
// in one fixed order, and a binary tree adds the leaves. Ranks that shard the contracted dim hold whole subtrees, so
// the tree can continue across ranks.
#pragma once
#include <cstdint>
#include <vector>

#include "tensor/tensor.h"

namespace tessera {

// Leaves of an axis. Each parallel axis that splits it must have a size that divides this power of two.
inline constexpr int64_t kLeaves = 8;

// Which part of a weight's dims is stored here, for the leaves of its matmuls. `segments` are the sizes of the fused
// outputs of the unsharded weight, [q | k | v] or [gate | up]: leaf i has chunk i of each. Empty: one segment.
struct WeightShards {
  int64_t inputs = 1, outputs = 1;  // ranks over which the dims of a weight (outputs, inputs) are sharded
  std::vector<int64_t> segments = {};
};

// The contracted dim in the order of accumulation.
struct LeafOrder {
  struct Run {
    int64_t begin = 0, size = 0;
  };
  std::vector<Run> runs;      // indices of the dim
  std::vector<int64_t> ends;  // of each leaf, counted along the runs; their number is a power of two

  int64_t size() const { return ends.back(); }
};

// `leaves` chunks of each segment; empty: one segment of `size`. Throws Error if the segments do not add up to `size`.
LeafOrder channel_leaves(int64_t size, int64_t leaves, const std::vector<int64_t>& segments = {});
// Rows (batch, tokens): leaf k has chunks k and 2 n - 1 - k of n = `leaves` pairs of chunks, of every sequence.
LeafOrder token_leaves(int64_t batch, int64_t tokens, int64_t leaves);

// Whether ops on the tensor's rank add by leaves (KernelChoice::layout_invariant).
bool adds_by_leaves(const Tensor& t);

}  // namespace tessera
