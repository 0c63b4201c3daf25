// Placements: how a tensor lies on the ranks of one mesh axis, and the one differentiable way from one to another.
//
//   R     replicated: every rank has all of it, and each has a part of its gradient, still to be summed
//   I     replicated, and so is its gradient: every rank computes the same
//   S(d)  sharded: rank r has piece r of dim d, as piece() cuts it, and the same piece of the gradient
//   P     a partial sum: the tensor is the sum of the ranks' arrays; each has all of the gradient
//
//            to R         to I         to S(b)          to P
//   from R   -            -            own piece        rank 0's
//   from I   -            -            own piece        rank 0's
//   from S   all-gather   all-gather   all-to-all       zeros around it
//   from P   all-reduce   all-reduce   reduce-scatter   -
//
// where "-" hands the same memory on, "own piece" takes a piece without a communication, "rank 0's" lets rank 0 keep
// its values and gives zeros to the others, and S(d) to S(d) is "-". The gradient of a value in R is a P, that of a
// value in P is an R, and those in I and S are placed like their values: that is dual(). So the backward pass of
// from -> to is dual(to) -> dual(from), found in the same table. Megatron's f is I -> R, its g is P -> I (Shoeybi et
// al. 2019, section 3); the idea of telling R from I is that of JAX's varying and invariant types.
//
//   h = gelu(matmul(redistribute(x, tp, I, R), w1));     // w1 cut by columns: h is S(1)
//   y = redistribute(matmul(h, w2), tp, P, I);           // w2 cut by rows
#pragma once

#include "autograd/var.h"
#include "parallel/comm/communicator.h"

namespace tessera {

struct Placement {
  enum class Kind : uint8_t { replicated, identical, sharded, partial };
  Kind kind = Kind::replicated;
  int dim = 0;        // dim that S cuts; negative counts from the end
  int64_t whole = 0;  // size of the whole dim that S cuts; 0 when the pieces are equal or it can be seen

  constexpr bool operator==(const Placement& other) const { return kind == other.kind && dim == other.dim; }
  std::string str() const;  // "R", "S(1)"
};

inline constexpr Placement R{Placement::Kind::replicated}, I{Placement::Kind::identical}, P{Placement::Kind::partial};
// A tensor whose pieces are not equal needs `whole` to leave S: no rank sees the others' sizes.
constexpr Placement S(int dim, int64_t whole = 0) { return {Placement::Kind::sharded, dim, whole}; }

// The placement of the gradient of a value in p.
constexpr Placement dual(const Placement& p) { return p == R ? P : p == P ? R : p; }

// `x` in another placement; shapes are those of one rank's part. Free on an axis of size 1 and from a placement to
// itself. May write over x when nobody else holds it. Every rank of the axis calls it; `axis` must outlive the graph.
// Throws Error (usage) that names both placements and the axis when a dim does not exist, or a rank's piece has not the
// size that piece() gives it. Cost: the bytes of the collective, for a tensor of as many elements as the whole; where
// pieces are not equal, those that move are padded to the largest.
Var redistribute(Var x, Communicator& axis, Placement from, Placement to);
// The same without a gradient.
Tensor redistribute(Tensor x, Communicator& axis, Placement from, Placement to);

// A tensor on its way to another placement.
class [[nodiscard]] PendingRedistribute {
 public:
  explicit PendingRedistribute(Tensor arrived) : tensor_(std::move(arrived)) {}
  // `unpack` makes the result from the arrived `tensor`, if `tensor` is not the result itself.
  PendingRedistribute(Work pending, Tensor tensor, std::function<Tensor(const Tensor&)> unpack = nullptr)
      : pending_(std::move(pending)), tensor_(std::move(tensor)), unpack_(std::move(unpack)) {}
  // The tensor in its new placement; throws what its communication threw. To be called once.
  Tensor wait();

 private:
  Work pending_;
  Tensor tensor_;
  std::function<Tensor(const Tensor&)> unpack_;
};
// The same in the background, but for S(a) -> S(b), which is done when this returns.
PendingRedistribute start_redistribute(Tensor x, Communicator& axis, Placement from, Placement to);

}  // namespace tessera
