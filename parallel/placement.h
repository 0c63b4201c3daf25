// Placements: how a tensor is distributed over the ranks of one mesh axis, and differentiable conversion between them.
//
//   R     replicated; each rank has a partial gradient, to be summed
//   I     replicated with a replicated gradient (identical): every rank computes the same values
//   S(d)  sharded: rank r has chunk_range() chunk r of dim d, and the same chunk of the gradient; `mirrored`: it has
//         chunks r and 2 n - 1 - r of 2 n equal chunks, in that order
//   P     partial: the tensor is the sum of the ranks' arrays; each has the full gradient
//
//            to R         to I         to S(b)          to P
//   from R   -            -            own chunk        rank 0's
//   from I   -            -            own chunk        rank 0's
//   from S   all-gather   all-gather   all-to-all       zero padding
//   from P   all-reduce   all-reduce   reduce-scatter   -
//
// "-" returns the same memory, "own chunk" slices without communication, "rank 0's" retains rank 0's values and returns
// zeros elsewhere, and S(d) to S(d) is "-". dual() is the placement of a value's gradient: P for R, R for P, and the
// same placement for I and S. The backward pass of from -> to is therefore dual(to) -> dual(from), in the same table.
// Megatron's f is I -> R and its g is P -> I (Shoeybi et al. 2019, section 3); distinguishing R from I follows JAX's
// varying and invariant types.
//
//   h = gelu(matmul(redistribute(x, tp, I, R), w1));     // w1 sharded by columns: h is S(1)
//   y = redistribute(matmul(h, w2), tp, P, I);           // w2 sharded by rows
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>

#include "autograd/var.h"
#include "parallel/comm/communicator.h"

namespace tessera {

struct Placement {
  enum class Kind : uint8_t { replicated, identical, sharded, partial };
  Kind kind = Kind::replicated;
  int dim = 0;            // sharded dim of S; negative counts from the end
  int64_t full_size = 0;  // of that dim; 0: equal chunks, or inferred
  bool mirrored = false;  // only between R, I or P and S

  constexpr bool operator==(const Placement& other) const {
    return kind == other.kind && dim == other.dim && mirrored == other.mirrored;
  }
  std::string str() const;  // "R", "S(1)"
};

inline constexpr Placement R{Placement::Kind::replicated}, I{Placement::Kind::identical}, P{Placement::Kind::partial};
// Leaving S with unequal chunks requires `full_size`, because no rank knows the others' sizes.
constexpr Placement S(int dim, int64_t full_size = 0) { return {Placement::Kind::sharded, dim, full_size}; }

constexpr Placement dual(const Placement& p) { return p == R ? P : p == P ? R : p; }

// Shapes are per rank. Free on an axis of size 1 and between equal placements. May overwrite x if it has no other
// owner. Collective; `axis` must outlive the graph. Throws Error (usage) with both placements and the axis if a dim
// does not exist or a rank's chunk does not have the size of chunk_range(). Cost: the volume of the collective for the
// full tensor; unequal chunks are padded to the largest when sent.
Var redistribute(Var x, Communicator& axis, Placement from, Placement to);
Tensor redistribute(Tensor x, Communicator& axis, Placement from, Placement to);

class [[nodiscard]] PendingRedistribute {
 public:
  explicit PendingRedistribute(Tensor arrived) : tensor_(std::move(arrived)) {}
  // `unpack` converts the received `tensor` to the result; null: `tensor` is the result.
  PendingRedistribute(Work pending, Tensor tensor, std::function<Tensor(const Tensor&)> unpack = nullptr)
      : pending_(std::move(pending)), tensor_(std::move(tensor)), unpack_(std::move(unpack)) {}
  // Rethrows communication errors. Call once.
  Tensor wait();
  // Converts the result further.
  PendingRedistribute then(std::function<Tensor(const Tensor&)> convert) &&;

 private:
  Work pending_;
  Tensor tensor_;
  std::function<Tensor(const Tensor&)> unpack_;
};
// redistribute() in the background, except S(a) -> S(b), which is complete on return.
PendingRedistribute start_redistribute(Tensor x, Communicator& axis, Placement from, Placement to);

}  // namespace tessera
