// Fusion of neighbouring ops: work that an op leaves to its consumer or does for its producer. Internal: fused ops,
// layers and strategies include this header, tessera.h does not.
//
//   deferred sum           add_residual() leaves x + y to the norm that reads it
//   row sums               a norm computes, with its gradients, the bias gradient of the matmul before it
//   joint gradients        an op writes several gradients, or adds to an accumulated one, in one pass
//   precomputed gradient   the loss computes the gradient of the head's weight in its forward pass
//
// All of them are optional. An op that does not implement a fusion reads Var::value() and Grads::output(), and the
// result is bitwise identical (docs/cuda.md, "Fused norms, residual additions and bias gradients").
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "autograd/var.h"

namespace tessera::fusion {

// Deferred sums. Var::value() adds if no op that reads both addends has done so.

struct DeferredAdd {
  Tensor value, addend;  // moved out when the sum is computed
  Tensor sum = {};
};
// Adds `addend` (same shape and dtype) on first read.
void defer_add(const Var& value, Tensor addend);
bool is_deferred(const Var& v);
struct Addends {
  Tensor value, addend;  // addend: undefined without a deferred sum; then skip set_sum()
};
Addends take_addends(const Var& v);
void set_sum(const Var& v, Tensor sum);

// Row sums: the sum over rows (C) of the gradient of a value (..., C), which is the gradient of a bias added to the
// value.

// Writes the sums into `out`, as sum_rows() does.
using RowSums = std::function<void(Tensor& out)>;
// State of an op's first output.
struct RowSumState {
  bool requested = false, required = false;
  RowSums sums = {};
};
// Requests the sums from the op that computes the gradient.
void request_row_sums(const Var& v);
bool row_sums_requested(const Var& v);
bool row_sums_requested(const Grads& g, int input);
// Declares that the consumer computes the sums. If they do not arrive (from another pipeline stage, in deferred work),
// they are computed in the same order, so that every layout is bitwise identical.
void require_row_sums(const Var& v);
bool row_sums_required(const Grads& g);
// Row sums of output 0's gradient, if its only consumer computed them; otherwise empty.
const RowSums& row_sums(const Grads& g);
// Grads::set() with row sums of the gradient.
void set(Grads& g, int input, Tensor gradient, RowSums sums);

// x as the output of an identity node that calls `before` in the backward pass, unless no gradient arrives. Deferred
// sums and row sums pass through.
Var pass_through(const char* op, Var x, std::function<void(const Grads&)> before);

// Joint gradients.

// The gradient accumulated for this input so far, moved out for a vjp that fuses the addition and returns the sum.
// Undefined if there is none, and for parameters.
Tensor take_accumulated(Grads& g, int input);
struct GradTarget {
  Tensor to;          // undefined if not required
  bool adds = false;  // accumulate instead of overwrite
};
// Whether write_grads() writes these inputs' gradients immediately, in one call.
bool writes_at_once(const Grads& g, int first, int count);
// Calls `write` for the gradients of `count` inputs from `first` on (distinct Vars): immediately for activations,
// possibly deferred for parameters. It writes any floating dtype, and accumulates if GradTarget::adds.
void write_grads(Grads& g, int first, int count, std::function<void(std::span<const GradTarget>)> write);

// A parameter's gradient that an op computes in its forward pass. It uses the parameter's gradient buffer if that is
// free, and moves to separate memory if another gradient arrives first. grad() and on_grad() ignore it until
// set_precomputed().
struct PrecomputedGrad {
  Tensor at;  // uninitialized, in the parameter's shape
};
std::shared_ptr<PrecomputedGrad> precomputed_grad(const Var& parameter, DType wide);
void set_precomputed(Grads& g, int input, std::shared_ptr<PrecomputedGrad> gradient);

}  // namespace tessera::fusion
