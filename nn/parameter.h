// A parameter: the one home of all that is known of it. Five things follow from here: its first values, its optimizer
// update, its name in a checkpoint, how often the gradient norm counts it, and the part of it that a rank holds.
//
// If tensor parallelism cuts a parameter, a rank has some indices of one dim:
//
//   whole (6, C)     runs {0, 1} {2, 1} {4, 1} of dim 0: rows 0, 2 and 4, the first half of each of q, k and v
//   here  (3, C)
#pragma once

#include "autograd/var.h"

namespace tessera {

// How a parameter starts: normal with the given standard deviation, or a constant.
struct Init {
  double deviation = 0;
  double constant = 0;
  static Init normal(double deviation) { return {deviation, 0}; }
  static Init zeros() { return {0, 0}; }
  static Init ones() { return {0, 1}; }
};

// The part of a parameter on one rank of a mesh axis: these runs of indices along `dim` are here.
struct ShardSpec {
  struct Run {
    int64_t begin = 0, size = 0;
  };
  std::string axis = {};  // the mesh axis that it is cut over
  int dim = 0;
  std::vector<Run> runs = {};  // empty: all of it is on every rank

  bool is_whole() const { return runs.empty(); }
  Shape slice_unit(Shape whole) const;  // the shape of what is here
};

struct Packed;  // nn/quantize/packed.h

struct Parameter {
  // Elements [begin, end) of the whole.
  struct Span {
    int64_t begin = 0, end = 0;
  };

  std::string name;  // in the whole model: "blocks.0.mlp.up.weight"
  Shape whole;       // `var` has the shape of the part here
  Init init = {};
  bool trainable = true;   // a frozen one has no gradient and no optimizer state; nothing of it is summed or counted
  bool is_expert = false;  // it is on some ranks of the data axis alone, where they share out experts
  bool decays = false;     // by weight decay: matrices, not biases nor norms
  // A matrix of a layer, of which the optimizer needs the whole (optim/muon.h); several where some of its rows are one
  // matrix and others another: so many rows each. Empty: all are one.
  bool whole_update = false;
  std::vector<int64_t> rows = {};
  // Parameters with the same `tie` are one parameter in several places, or with several uses. `tie` is its name in a
  // whole model. Gradients of the copies are also summed over the ranks that have them.
  std::string tie = {};
  ShardSpec shard = {};
  Span zero_grad_range = {};  // where the true gradient is zero, and the computed one is rounding
  Var var = {};               // the value, and its gradient
  // The bytes of a frozen matrix that is held in four bits: they are its value, and `var` has a shape alone. Else null.
  std::shared_ptr<Packed> packed = {};

  bool is_tied() const { return !tie.empty(); }
  bool is_copy() const { return is_tied() && tie != name; }  // a checkpoint and the norm know the original alone
  // The name that its first values are drawn by, and that a checkpoint has for it.
  const std::string& source() const { return is_tied() ? tie : name; }
  Shape local() const;  // the shape of the part here
  // The stored form, in buffers, messages and files: its elements, or the bytes of a matrix in four bits.
  Shape stored() const;                   // shape of the whole, in that form
  const ShardSpec& stored_shard() const;  // the part of stored() that is here
  int64_t stored_here() const;            // elements or bytes of that part
  DType stored_dtype(DType of_values) const { return packed ? DType::uint8 : of_values; }
};

// Calls f(here, whole, count) for the longest runs of elements that are consecutive in both: `here` and `whole` are
// flat indices. [begin, end) are elements of the part here.
template <class F>
void for_each_run(const Shape& whole, const ShardSpec& shard, int64_t begin, int64_t end, const F& f) {
  if (begin >= end) return;
  if (shard.is_whole()) return f(begin, begin, end - begin);
  int64_t inner = 1, kept = 0;
  for (int d = shard.dim + 1; d < whole.ndim(); ++d) inner *= whole[d];
  for (const ShardSpec::Run& run : shard.runs) kept += run.size * inner;  // elements for each index of the dims before
  const int64_t row = whole[shard.dim] * inner;
  int64_t o = begin / kept, here = o * kept;
  for (; here < end; ++o)
    for (const ShardSpec::Run& run : shard.runs) {
      const int64_t size = run.size * inner, from = begin > here ? begin : here,
                    to = end < here + size ? end : here + size;
      if (from < to) f(from, o * row + run.begin * inner + from - here, to - from);
      here += size;
    }
}
// Calls f() for the runs of the stored form of a parameter.
template <class F>
void for_each_run(const Parameter& p, int64_t begin, int64_t end, const F& f) {
  for_each_run(p.stored(), p.stored_shard(), begin, end, f);
}

// Flat memory: the parameters of one unit (an embedding, a block, a head) lie in one contiguous buffer, their gradients
// in another, so that the optimizer, the gradient norm, buckets and shards each work on long runs of memory.

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

  // A frozen unit, whose parameters are all frozen, has no gradients.
  bool trainable() const { return slots.empty() || slots[0].parameter->trainable; }
  // Whether its parameters are matrices that are updated as wholes; a unit has only these or only others.
  bool matrices() const { return !slots.empty() && slots[0].parameter->whole_update; }
};

}  // namespace tessera
