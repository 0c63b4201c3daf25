// Var: a tensor with a memory of how it was made.
//
// An op on Vars computes its value and, when gradients are on and an input wants one, records a node: edges to its
// inputs and a closure that turns the gradients of its outputs into those of its inputs (its vjp). backward() walks the
// nodes from the newest to the oldest, which is a topological order and the same on every run. Saved values are
// Tensors, never Vars, so the graph has no cycles and frees itself as it is walked.
#pragma once

#include "tensor/tensor.h"

namespace tessera {

class DeferredWeightGrads;
struct PrecomputedGrad;
class Grads;
struct Node;
struct Leaf;

// The part of an input that an op keeps for its backward: the tensor, or a recipe for it (see Var::with_recompute).
class Saved {
 public:
  Saved() = default;
  Saved(Tensor t) : tensor_(std::move(t)) {}  // NOLINT: a tensor saves itself
  explicit Saved(std::function<Tensor()> recipe) : recipe_(std::move(recipe)) {}
  Tensor get() const { return recipe_ ? recipe_() : tensor_; }
  // The form to keep for a weight gradient that may be put off (null: it is not): the tensor itself then, since a
  // recipe may need parameters that are gone when the gradient is made (parallel/zero.h).
  Saved until(const DeferredWeightGrads* later) const { return later ? Saved(get()) : *this; }

 private:
  Tensor tensor_;
  std::function<Tensor()> recipe_;
};

class Var {
 public:
  Var() = default;
  explicit Var(Tensor value, bool requires_grad = false);
  // A leaf that stands for a value made elsewhere (before a recomputed block, on another pipeline stage). Its gradient
  // is passed on to that place. It is not copied, and does not wait when weight gradients wait.
  static Var input(Tensor value);

  bool defined() const { return impl_ != nullptr; }
  const Tensor& value() const;
  // A tensor of the value's shape, dtype and arena; its elements may be a term of a late sum alone.
  const Tensor& like() const;
  const Shape& shape() const { return like().shape(); }
  int64_t dim(int i) const { return like().dim(i); }
  DType dtype() const { return like().dtype(); }
  bool requires_grad() const;
  bool is_leaf() const;
  // This value. If it requires no gradient, an input() in its place, so that the backward pass goes through it to the
  // parameters below.
  Var tracked() const;

  // --- leaves that require a gradient (parameters) ---
  // The accumulated gradient; undefined before the first.
  Tensor grad() const;
  // Gradients go into this view from now on (a slice of a flat buffer; float32 under a bfloat16 value is allowed).
  void set_grad_buffer(Tensor buffer);
  // The next gradient overwrites the buffer; nothing is written now. Gradients of a backward() that threw are
  // dropped.
  void clear_grad();
  // A gradient that no one brought becomes zero in its buffer.
  void zero_missing_grad();
  // Replaces the value (materialize() gives a meta parameter its memory; a frozen one too). The shape must not change.
  void set_value(Tensor value);
  // `provide` makes the buffer (by set_grad_buffer) when the first gradient comes; before that there is none.
  // drop_grad() takes it away again.
  void provide_grad(std::function<void()> provide);
  void drop_grad();
  // Ops that keep this leaf for their backward read its value then, and hold no memory until then: for parameters
  // whose memory comes and goes.
  void read_late();
  // Calls f when this leaf has received every gradient that one backward() brings it, deferred ones included.
  void on_grad(std::function<void()> f);

  // --- for ops ---
  // This value, known to be cheap to make again: an op that saves it keeps `recipe` instead of the elements.
  Var with_recompute(std::function<Tensor()> recipe) const;
  Saved saved() const;
  // This Var's place in the graph without its value: an op that keeps no input passes it to record().
  Var edge() const;
  // Room for a gradient of this Var, of its shape and of dtype `wide`, contents undefined. Nothing is said of the
  // gradient until it is given: grad() and on_grad() know nothing of it.
  std::shared_ptr<PrecomputedGrad> precomputed_grad(DType wide) const;
  // The tensor, moved out when this was the last handle to it, so that an op may write over it (Tensor::unique).
  Tensor take() &&;
  // The value is from now on its sum with `addend`, of its shape and dtype. The sum is made when it is first read, or
  // by an op that has to read both anyhow (add_norm): that op takes the terms, and sets the sum.
  void defer_add(Tensor addend) const;
  struct Terms {
    Tensor value, addend;  // the addend is undefined where no sum is to be made; none is set then
  };
  Terms take_addends() const;
  void set_sum(Tensor sum) const;
  bool is_deferred() const;              // a sum that is not made yet
  void share_value(const Var& x) const;  // the value of x, which may be late
  // The gradient's sums over rows are worth making beside it, for a bias that was added to this value.
  void request_row_sums() const;
  bool row_sums_requested() const;
  // An op that makes them takes this value. Where its sums do not arrive (from another stage, in put-off work), they
  // are made in the same order, so that every layout has the same bits.
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

// For inputs that an op may have to do without, such as a bias.
inline Tensor value_or_none(const Var& v) { return v.defined() ? v.value() : Tensor(); }
inline Saved saved_or_none(const Var& v) { return v.defined() ? v.saved() : Saved(); }
// The part of x that the gradient of `w` needs, if `w` gets a gradient.
inline Saved saved_for(const Var& w, const Var& x) { return w.requires_grad() ? x.saved() : Saved(); }

// A parameter's gradient that an op makes in its forward pass (Var::precomputed_grad, Grads::set_precomputed). It
// stands in the parameter's own buffer where that is free, and moves to memory of its own when another gradient comes
// there first.
struct PrecomputedGrad {
  Tensor at;
};

// Gradients are recorded unless a NoGrad lives on this thread.
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

// The work of backward() on parameters, put off: run() does it, in the same order. Until then the parameters are
// unchanged, their gradients and the counts of on_grad() too. So other backward passes over the same weights may come
// between, and the bits stay the same. Overlap of communication and zero-bubble pipelines use this split (Qi et al.
// 2024, section 2).
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
  Tensor seed;                           // gradient of the root; undefined means one
  DeferredWeightGrads* defer = nullptr;  // where gradients of parameters go instead of being made at once
};

// Fills the gradients of every leaf that `root` depends on. Throws when root has no graph, when its graph was walked
// before (saved values are gone), or when the seed does not have root's shape.
void backward(const Var& root, const BackwardOptions& options = {});

// Where a gradient goes.
struct GradTarget {
  Tensor to;          // undefined where nobody wants it
  bool adds = false;  // to the sum of gradients that stands there, instead of being written over it
};

// Writes the sums over the rows of a gradient (..., C) into `out` (C), as sum_rows() does.
using RowSums = std::function<void(Tensor& out)>;

// The argument of a vjp: gradients of the outputs in, gradients of the inputs out.
class Grads {
 public:
  // Gradient of output i; undefined when nothing depended on that output.
  const Tensor& output(int i = 0) const;
  // The same, handed over, so that the vjp may write over it.
  Tensor take_output(int i = 0);
  bool has_output(int i) const { return output(i).defined(); }
  bool needs(int input) const;
  void give(int input, Tensor gradient, RowSums row_sums = {});
  // The gradients that other ops have given this input until now, handed over for a vjp that adds it to its own
  // gradient in one pass: it gives the sum. Undefined where nothing came, and of a parameter.
  Tensor take_accumulated(int input);
  // Whether the op that made the input can use the sums over rows of its gradient.
  bool row_sums_requested(int input) const;
  // Those of output 0's gradient, where one op alone has brought it and made them; else an empty function.
  const RowSums& row_sums() const;
  bool row_sums_required() const;
  // Whether write_grad() of these inputs writes at once, and all of them in one call.
  bool writes_at_once(int first, int count) const;
  // A gradient written by `write` into a given tensor: straight into a parameter's buffer where that is possible, and
  // later than now when backward() defers weight gradients. For inputs that are no parameters it is made at once, in
  // float32 where they are bfloat16.
  void write_grad(int input, std::function<void(Tensor& out)> write);
  // Writes gradients like the function above, of `count` inputs from `first` on, no two of them one Var, whose
  // gradients are made at once: `write` adds those that are to be added, in any floating dtype.
  void write_grad(int first, int count, std::function<void(std::span<const GradTarget>)> write);
  // A gradient that was made in the forward pass.
  void set_precomputed(int input, std::shared_ptr<PrecomputedGrad> gradient);
  DeferredWeightGrads* defer() const { return defer_; }  // for ops that call backward() themselves

 private:
  friend void backward(const Var&, const BackwardOptions&);
  Grads(Node& node, DeferredWeightGrads* defer) : node_(node), defer_(defer) {}
  Node& node_;
  DeferredWeightGrads* defer_;
};

// Makes the Vars of an op's outputs. `vjp` is kept only when gradients are on and an input requires one.
std::vector<Var> record(const char* op, std::vector<Tensor> outputs, const std::vector<Var>& inputs,
                        std::function<void(Grads&)> vjp);
inline Var record_one(const char* op, Tensor output, const std::vector<Var>& inputs, std::function<void(Grads&)> vjp) {
  return record(op, {std::move(output)}, inputs, std::move(vjp))[0];
}

}  // namespace tessera
