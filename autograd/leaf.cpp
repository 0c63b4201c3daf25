// Gradient buffers of leaves, and the memory of parameters.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "autograd/graph.h"
#include "autograd/parameter_memory.h"
#include "tensor/ops/elementwise.h"

namespace tessera {

Leaf& GraphAccess::leaf(const Var& v, const char* what) {
  if (!v.impl_ || !v.impl_->leaf)
    throw Error(std::string("[var] ") + what + " requires a leaf that requires a gradient (a parameter)");
  return *v.impl_->leaf;
}

void set_grad_buffer(const Var& parameter, Tensor buffer) {
  Leaf& leaf = GraphAccess::leaf(parameter, "set_grad_buffer()");
  if (!(buffer.shape() == leaf.shape))
    throw Error("[var] gradient buffer is " + buffer.describe() + "; expected the parameter's shape " +
                leaf.shape.str());
  leaf.reclaim_buffer();
  leaf.grad = std::move(buffer);
  leaf.holds = GradState::nothing;
}

void zero_missing_grad(const Var& parameter) {
  Leaf& leaf = GraphAccess::leaf(parameter, "zero_missing_grad()");
  if (leaf.holds == GradState::nothing) leaf.settle();
}

void provide_grad(const Var& parameter, std::function<void()> provide) {
  GraphAccess::leaf(parameter, "provide_grad()").provide = std::move(provide);
  drop_grad(parameter);
}

void drop_grad(const Var& parameter) {
  Leaf& leaf = GraphAccess::leaf(parameter, "drop_grad()");
  leaf.reclaim_buffer();
  leaf.grad = Tensor();
  leaf.holds = GradState::nothing;
}

void read_at_backward(const Var& parameter) {
  const auto& impl = GraphAccess::impl(parameter);
  if (!impl || impl->node) GraphAccess::leaf(parameter, "read_at_backward()");  // throws
  impl->read_at_backward = true;
}

void Leaf::reclaim_buffer() {
  if (const auto early = lent.lock()) early->at = early->at.clone();
  lent.reset();
}

void Leaf::make_buffer() {
  if (grad.defined()) return;
  if (provide)
    provide();
  else
    grad = Tensor::empty(shape, dtype, arena, category);
}

void Leaf::settle() {
  reclaim_buffer();
  make_buffer();
  grad.fill(0);
  holds = GradState::all;
}

// Ops write gradients in the value's dtype or in float32; for a buffer of a different dtype they are rounded.
void Leaf::write_fresh(const Tensor& out, const std::function<void(Tensor&)>& write) const {
  Tensor target = out;
  if (out.dtype() == dtype || out.dtype() == DType::float32) return write(target);
  Tensor exact = out.make(shape, dtype, Category::workspace);
  write(exact);
  target.copy_from(exact);
}

void Leaf::receive(const std::function<void(Tensor&)>& write) {
  if (transient) {
    const Tensor one = Tensor::empty(shape, dtype, arena, category);
    write_fresh(one, write);
    return receive(one);
  }
  fusion::GradTarget at = place();
  const Tensor one = at.adds ? at.to.make(shape, at.to.dtype(), Category::workspace) : at.to;
  write_fresh(one, write);
  if (at.adds) add_(at.to, one);
  gradient_done();
}

fusion::GradTarget Leaf::place() {
  reclaim_buffer();
  make_buffer();
  if (holds == GradState::nothing) {
    holds = GradState::this_pass;
    return {grad};
  }
  if (sum().defined()) return {sum(), true};
  return {sum() = grad.make(shape, grad.dtype(), Category::workspace)};
}

// A gradient in the lent buffer is already in place; any other is treated as newly written.
void Leaf::receive(const std::shared_ptr<fusion::PrecomputedGrad>& early) {
  if (lent.lock() == early) {
    lent.reset();
    holds = GradState::this_pass;
    return gradient_done();
  }
  if (transient || holds == GradState::nothing || !grad.defined()) return receive(std::exchange(early->at, {}));
  const Tensor one = std::exchange(early->at, {}).to(grad.dtype());
  if (sum().defined())
    add_(sum(), one);
  else
    sum() = one;
  gradient_done();
}

Tensor Leaf::take() {
  return std::exchange(holds, GradState::nothing) == GradState::nothing ? Tensor() : std::exchange(grad, {});
}

void Leaf::receive(Tensor gradient) {
  if (!transient) return receive([&](Tensor& out) { out.copy_from(gradient); });
  if (std::exchange(holds, GradState::all) == GradState::nothing) grad = Tensor();
  if (grad.defined()) gradient = gradient.to(grad.dtype());
  add_gradient(grad, std::move(gradient));
  gradient_done();
}

// Addition is bitwise commutative. Shared tensors are not overwritten.
void add_gradient(Tensor& total, Tensor g) {
  if (!total.defined())
    total = std::move(g);
  else if (total.unique())
    add_(total, g);
  else if (g.unique()) {
    add_(g, total);
    total = std::move(g);
  } else
    total = binary<Add>(total, g);
}

void Leaf::gradient_done() {
  if (--expected > 0) return;
  if (pass.defined()) add_(grad, std::exchange(pass, Tensor()));
  if (holds == GradState::this_pass) holds = GradState::all;
  for (const auto& hook : hooks) hook();
}

}  // namespace tessera
