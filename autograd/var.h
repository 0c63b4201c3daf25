// Var: a tensor with reverse-mode differentiation. If gradients are enabled and an input requires one, an op records a
// node: edges to its inputs and a closure that maps output gradients to input gradients (its vjp). backward() visits
// the nodes from newest to oldest, a topological order that is the same in every run. Nodes save Tensors, never Vars,
// so the graph has no cycles and is freed during the walk.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tensor/tensor.h"

namespace tessera {

class DeferredWeightGrads;
struct Node;

class Saved {
 public:
  Saved() = default;
  Saved(Tensor t) : tensor_(std::move(t)) {}  // NOLINT: implicit conversion
  explicit Saved(std::function<Tensor()> recompute) : recompute_(std::move(recompute)) {}
  Tensor get() const { return recompute_ ? recompute_() : tensor_; }
  // The form to save for a weight gradient (`later` null: not deferred). Deferred gradients need the tensor itself,
  // because recomputation may need parameters that are freed by then (parallel/zero.h).
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
  const Shape& shape() const { return meta().shape(); }
  int64_t dim(int i) const { return meta().dim(i); }
  DType dtype() const { return meta().dtype(); }
  bool requires_grad() const;
  // This value, as an input() if it requires no gradient, so that the backward pass also visits the ops that use it.
  Var tracked() const { return requires_grad() || !defined() ? *this : input(value()); }

  // For leaves that require a gradient (parameters): undefined before the first gradient.
  Tensor grad() const;
  // The next gradient overwrites the buffer. Discards gradients of a backward() that threw.
  void clear_grad();
  // `value` has the same shape (materialize() allocates meta parameters, including frozen ones).
  void set_value(Tensor value);
  // Calls f when this leaf has received all gradients of one backward(), including deferred ones.
  void on_grad(std::function<void()> f);

  // For ops whose result is cheap to recompute: this value, for which consumers save `recompute` instead of the
  // elements.
  Var with_recompute(std::function<Tensor()> recompute) const;
  Saved saved() const;
  // The graph position without the value, as an argument of record() for ops that save no inputs.
  Var edge() const;
  // The value, moved out if this is the last handle, so that an op may overwrite it (Tensor::unique).
  Tensor take() &&;

 private:
  friend struct GraphAccess;  // engine, parameter memory and fusion
  struct Impl;
  explicit Var(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  // For shape and dtype; the elements may be only one addend of a deferred sum.
  const Tensor& meta() const;
  std::shared_ptr<Impl> impl_;
};

// For optional inputs such as a bias.
inline Tensor value_or_none(const Var& v) { return v.defined() ? v.value() : Tensor(); }
inline Saved saved_or_none(const Var& v) { return v.defined() ? v.saved() : Saved(); }

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
// between with bitwise identical results. Used for overlapped communication and zero-bubble pipelines (Qi et al. 2024,
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
  Tensor seed;                           // gradient of the root; if undefined, 1
  DeferredWeightGrads* defer = nullptr;  // collects weight gradients
};

// Accumulates the gradients of all leaves below `root`. Throws Error if root has no graph, its graph was already
// traversed (saved values are freed), or the seed differs from root's shape.
void backward(const Var& root, const BackwardOptions& options = {});

// The gradients of an op's outputs, and the gradients of its inputs that its vjp produces.
class Grads {
 public:
  // Undefined if nothing depended on output i.
  const Tensor& output(int i = 0) const;
  // Moved out, so that the vjp may overwrite it.
  Tensor take_output(int i = 0);
  bool needs(int input) const;
  void set(int input, Tensor gradient);
  // `write` computes a gradient into the given tensor: a parameter's buffer if possible, and deferred if backward()
  // defers weight gradients. For other inputs it runs immediately, in float32 if they are bfloat16.
  void write_grad(int input, std::function<void(Tensor& out)> write);
  DeferredWeightGrads* defer() const { return defer_; }  // for ops that call backward() themselves

 private:
  friend struct GraphAccess;
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
