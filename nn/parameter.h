// Parameter metadata: initial values, optimizer update, checkpoint name, multiplicity in the gradient norm, and the
// local shard.
//
// A sharded parameter has some indices of one dim:
//
//   full  (6, C)     runs {0, 1} {2, 1} {4, 1} of dim 0: rows 0, 2 and 4, the first half of each of q, k and v
//   local (3, C)
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "autograd/var.h"

namespace tessera {

// Normal with the given standard deviation, or constant.
struct Init {
  double deviation = 0;
  double constant = 0;
  static Init normal(double deviation) { return {deviation, 0}; }
  static Init zeros() { return {0, 0}; }
  static Init ones() { return {0, 1}; }
};

// Shard of a parameter on one rank of a mesh axis: these runs of indices along `dim`.
struct ShardSpec {
  struct Run {
    int64_t begin = 0, size = 0;
  };
  std::string axis = {};
  int dim = 0;
  std::vector<Run> runs = {};  // empty: replicated

  bool is_replicated() const { return runs.empty(); }
  Shape slice_unit(Shape full) const;  // local shape
};

struct Packed;  // nn/quantize/packed.h

// State of a module, shared with its strategy and optimizers; it expires with the module. `awaits_gradients`: there are
// no reduced gradients for an update.
struct ModuleState {
  bool has_strategy = false, awaits_gradients = false;
};

struct Parameter {
  struct Span {
    int64_t begin = 0, end = 0;
  };

  std::string name;  // in the full model: "blocks.0.mlp.up.weight"
  Shape full_shape;  // `var` has the local shape
  Init init = {};
  bool trainable = true;   // frozen: no gradient, no optimizer state, excluded from reductions and counts
  bool is_expert = false;  // stored on only some data ranks with expert parallelism
  bool decays = false;     // weight decay applies: matrices, not biases or norms
  // The optimizer needs the full matrix (optim/muon.h); `rows`: rows of each fused matrix; empty: one matrix.
  bool full_matrix_update = false;
  std::vector<int64_t> rows = {};
  // Name of a tied parameter in the full model. All parameters with this `tie` are replicas of that parameter or
  // separate copies for its uses; their gradients are summed, also over ranks.
  std::string tie = {};
  ShardSpec shard = {};
  Span zero_grad_range = {};  // elements whose exact gradient is zero, so the computed gradient is only rounding error
  Var var = {};
  // A frozen 4-bit matrix: its bytes are the value, and `var` is meta.
  std::shared_ptr<Packed> packed = {};
  std::shared_ptr<ModuleState> state = std::make_shared<ModuleState>();  // one per strategy

  bool is_tied() const { return !tie.empty(); }
  bool is_copy() const { return is_tied() && tie != name; }  // excluded from checkpoints and the norm
  // Name for RNG streams and checkpoints.
  const std::string& source() const { return is_tied() ? tie : name; }
  Shape local() const { return shard.slice_unit(full_shape); }
  // Stored form, in buffers, messages and files: elements, or the bytes of a 4-bit matrix.
  Shape stored() const;                   // of the full parameter
  const ShardSpec& stored_shard() const;  // local shard of stored()
  int64_t stored_here() const;            // its elements or bytes
  DType stored_dtype(DType of_values) const { return packed ? DType::uint8 : of_values; }
};

// Calls f(here, full, count) for the maximal runs of elements that are consecutive in the shard and in the full
// parameter, with flat indices of both. [begin, end) are elements of the shard.
template <class F>
void for_each_run(const Shape& full_shape, const ShardSpec& shard, int64_t begin, int64_t end, const F& f) {
  if (begin >= end) return;
  if (shard.is_replicated()) return f(begin, begin, end - begin);
  int64_t inner = 1, per_index = 0;
  for (int d = shard.dim + 1; d < full_shape.ndim(); ++d) inner *= full_shape[d];
  for (const ShardSpec::Run& run : shard.runs) per_index += run.size * inner;  // elements per outer index
  const int64_t row = full_shape[shard.dim] * inner;
  int64_t o = begin / per_index, here = o * per_index;
  for (; here < end; ++o)
    for (const ShardSpec::Run& run : shard.runs) {
      const int64_t size = run.size * inner, from = begin > here ? begin : here,
                    to = end < here + size ? end : here + size;
      if (from < to) f(from, o * row + run.begin * inner + from - here, to - from);
      here += size;
    }
}
template <class F>
void for_each_run(const Parameter& p, int64_t begin, int64_t end, const F& f) {
  for_each_run(p.stored(), p.stored_shard(), begin, end, f);
}

// Flat buffers: a unit's parameters are contiguous in one buffer and their gradients in another, so that optimizer,
// gradient norm, buckets and shards operate on long contiguous runs.

struct Slot {
  Parameter* parameter = nullptr;
  int64_t begin = 0;  // a multiple of 16; gaps are always zero
  int64_t size = 0;   // elements, or bytes, of the local shard
  int64_t end() const { return begin + size; }
  // Of the unit's full `array`.
  Tensor full_view(const Tensor& array) const { return array.narrow(0, begin, size).reshape(parameter->full_shape); }
};

struct NamedTensor {
  std::string name;
  Tensor tensor;
};

// A unit or its shard, in which a slot may begin before element 0 or end past the last. The parameters must outlive it.
struct FlatUnit {
  std::string name;         // "blocks.0"
  Tensor values;            // 1-D: float64, float32 or bfloat16; uint8 for 4-bit matrices
  Tensor grads;             // 1-D, as long as values; possibly of a different dtype
  std::vector<Slot> slots;  // ordered by begin, not overlapping

  // A unit's parameters are all trainable, or all frozen and without gradients.
  bool trainable() const { return slots.empty() || slots[0].parameter->trainable; }
  // A unit has only matrices with full-matrix updates, or none.
  bool matrices() const { return !slots.empty() && slots[0].parameter->full_matrix_update; }
};

}  // namespace tessera
