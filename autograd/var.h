// Var: a tensor with reverse-mode differentiation. If gradients are enabled and an input requires one, an op records a
// node: edges to its inputs and a closure that maps output gradients to input gradients (its vjp). backward() visits
// the nodes from newest to oldest, a topological order that is the same in every run. Nodes save Tensors, never Vars,
// so the graph has no cycles and is freed during the walk.
#pragma once

#include "tensor/tensor.h"

namespace tessera {

class DeferredWeightGrads;
struct PrecomputedGrad;
class Grads;
struct Node;
struct Leaf;

class Saved {
 public:
  Saved() = default;
  Saved(Tensor t) : tensor_(std::move(t)) {}  // NOLINT: implicit conversion
  explicit Saved(std::function<Tensor()> recompute) : recompute_(std::move(recompute)) {}
  Tensor get() const { return recompute_ ? recompute_() : tensor_; }
  // The form to save for a possibly deferred weight gradient (null: not deferred). Deferred gradients need the tensor
  // itself, because recomputation may need parameters that are freed by then (parallel/zero.h).
  Saved until(const DeferredWeightGrads* later) const { return later ? Saved(get()) : *this; }

 private:
  Tensor tensor_;
  std::function<Tensor()> recompute_;
};

class Var {
 public:
  Var() = default;
  explicit Var(Tensor value, bool requires_grad = false);
  // A leaf for a value computed elsewhere (before a checkpointed block, on another pipeline stage). Its gradient is
  // neither copied nor deferred with weight gradients.
  static Var input(Tensor value);

  bool defined() const { return impl_ != nullptr; }
  const Tensor& value() const;
  // For shape, dtype and arena; the elements may be only one addend of a deferred sum.
  const Tensor& like() const;
  const Shape& shape() const { return like().shape(); }
  int64_t dim(int i) const { return like().dim(i); }
  DType dtype() const { return like().dtype(); }
  bool requires_grad() const;
  bool is_leaf() const;
  // This value, as an input() if it requires no gradient, so that the backward pass reaches the parameters below.
  Var tracked() const;

  // For leaves that require a gradient (parameters): undefined before the first gradient.
  Tensor grad() const;
  // Accumulates gradients into this view (a slice of a flat buffer; may be float32 for a bfloat16 value).
  void set_grad_buffer(Tensor buffer);
  // The next gradient overwrites the buffer. Discards gradients of a backward() that threw.
  void clear_grad();
  void zero_missing_grad();
  // `value` has the same shape (materialize() allocates meta parameters, including frozen ones).
  void set_value(Tensor value);
  // `provide` allocates the buffer (by set_grad_buffer) on the first gradient; drop_grad() releases it.
  void provide_grad(std::function<void()> provide);
  void drop_grad();
  // Ops that save this leaf read its value at backward time and keep no reference to its memory: for parameters that
  // are freed and gathered again.
  void read_at_backward();
  // Calls f when this leaf has received all gradients of one backward(), including deferred ones.
  void on_grad(std::function<void()> f);

  // For ops: this value, cheap to recompute, for which ops save `recompute` instead of the elements.
  Var with_recompute(std::function<Tensor()> recompute) const;
  Saved saved() const;
  // The position in the graph without the value, for ops that save no inputs, as an argument of record().
  Var edge() const;
  // An uninitialized buffer for a gradient of this Var, in its shape and dtype `wide`. grad() and on_grad() ignore it
  // until set_precomputed().
  std::shared_ptr<PrecomputedGrad> precomputed_grad(DType wide) const;
  // Moved out if this is the last handle, so that an op may overwrite it (Tensor::unique).
  Tensor take() &&;
  // Adds `addend` (same shape and dtype) to the value on first read, or in an op that reads both anyway (add_norm),
  // which takes the addends and sets the sum.
  void defer_add(Tensor addend) const;
  struct Terms {
    Tensor value, addend;  // addend: undefined without a deferred sum; then skip set_sum()
  };
  Terms take_addends() const;
  void set_sum(Tensor sum) const;
  bool is_deferred() const;
  void share_value(const Var& x) const;  // x's value may be deferred
  // Requests the row sums of this gradient from the op that computes it, for a bias that was added to this value.
  void request_row_sums() const;
  bool row_sums_requested() const;
  // Declares that the consumer computes row sums. If they do not arrive (from another stage, in deferred work), they
  // are computed in the same order, so that every layout is bitwise identical.
  void require_row_sums() const;

 private:
  friend struct Node;
  friend class Grads;
  friend std::vector<Var> record(const char*, std::vector<Tensor>, const std::vector<Var>&,
                                 std::function<void(Grads&)>);
  friend void backward(const Var&, const struct BackwardOptions&);
  struct Impl;
  explicit Var(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  Impl& leaf_impl(const char* what) const;
  std::shared_ptr<Impl> impl_;
};

// For optional inputs such as a bias.
inline Tensor value_or_none(const Var& v) { return v.defined() ? v.value() : Tensor(); }
inline Saved saved_or_none(const Var& v) { return v.defined() ? v.saved() : Saved(); }
// x as saved for the gradient of `w`.
inline Saved saved_for(const Var& w, const Var& x) { return w.requires_grad() ? x.saved() : Saved(); }

// A parameter's gradient that an op computes in its forward pass. It uses the parameter's gradient buffer if that is
// free, and moves to separate memory if another gradient arrives first.
struct PrecomputedGrad {
  Tensor at;
};

// False while a NoGrad exists on this thread.
bool grad_enabled();
class GradMode : NotCopied {
 public:
  explicit GradMode(bool enabled);
  ~GradMode();

 private:
  bool before_;
};
struct NoGrad : GradMode {
  NoGrad() : GradMode(false) {}
};

// Deferred weight gradients of a backward(): run() computes them in the same order. Until then parameters, their
// gradients and the counts of on_grad() are unchanged, so other backward passes over the same weights may run in
// between with bitwise identical results. For overlap of communication and zero-bubble pipelines (Qi et al. 2024,
// section 2).
class DeferredWeightGrads {
 public:
  void run();
  bool empty() const { return pending_.empty(); }

 private:
  friend class DeferrableUpdates;
  std::vector<std::function<void()>> pending_;
  ArenaPtr arena_;
};

struct BackwardOptions {
  Tensor seed;                           // of the root; undefined: one
  DeferredWeightGrads* defer = nullptr;  // collects weight gradients
};

// Accumulates the gradients of all leaves below `root`. Throws Error if root has no graph, its graph was already
// traversed (saved values are freed), or the seed differs from root's shape.
void backward(const Var& root, const BackwardOptions& options = {});

struct GradTarget {
  Tensor to;          // undefined if not required
  bool adds = false;  // accumulate instead of overwrite
};

// Writes the sums over the rows of a gradient (..., C) into `out` (C), as sum_rows() does.
using RowSums = std::function<void(Tensor& out)>;

class Grads {
 public:
  // Undefined if nothing depended on output i.
  const Tensor& output(int i = 0) const;
  // Moved out, so that the vjp may overwrite it.
  Tensor take_output(int i = 0);
  bool has_output(int i) const { return output(i).defined(); }
  bool needs(int input) const;
  void give(int input, Tensor gradient, RowSums row_sums = {});
  // The gradient accumulated for this input so far, moved out for a vjp that fuses the addition and returns the sum.
  // Undefined if there is none, and for parameters.
  Tensor take_accumulated(int input);
  // Whether the op that produced the input uses the row sums of its gradient.
  bool row_sums_requested(int input) const;
  // Of output 0's gradient, if its only consumer computed them; otherwise empty.
  const RowSums& row_sums() const;
  bool row_sums_required() const;
  // Whether write_grad() of these inputs writes immediately, and all in one call.
  bool writes_at_once(int first, int count) const;
  // `write` computes a gradient into the given tensor: a parameter's buffer if possible, and deferred if backward()
  // defers weight gradients. For other inputs it runs immediately, in float32 if they are bfloat16.
  void write_grad(int input, std::function<void(Tensor& out)> write);
  // For `count` inputs from `first` on, distinct Vars whose gradients are written immediately: `write` accumulates if
  // GradTarget::adds, in any floating dtype.
  void write_grad(int first, int count, std::function<void(std::span<const GradTarget>)> write);
  void set_precomputed(int input, std::shared_ptr<PrecomputedGrad> gradient);
  DeferredWeightGrads* defer() const { return defer_; }  // for ops that call backward() themselves

 private:
  friend void backward(const Var&, const BackwardOptions&);
  Grads(Node& node, DeferredWeightGrads* defer) : node_(node), defer_(defer) {}
  Node& node_;
  DeferredWeightGrads* defer_;
};

// Creates an op's outputs. Stores `vjp` only if gradients are enabled and an input requires one.
std::vector<Var> record(const char* op, std::vector<Tensor> outputs, const std::vector<Var>& inputs,
                        std::function<void(Grads&)> vjp);
inline Var record_one(const char* op, Tensor output, const std::vector<Var>& inputs, std::function<void(Grads&)> vjp) {
  return record(op, {std::move(output)}, inputs, std::move(vjp))[0];
}

}  // namespace tessera
