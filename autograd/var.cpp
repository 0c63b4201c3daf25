// Var handles and leaves.
#include "autograd/var.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>

#include "autograd/graph.h"
#include "tensor/ops/elementwise.h"

namespace tessera {
namespace {
// The project's only thread-local state: whether this thread records, and the number of recorded nodes.
thread_local struct {
  bool enabled = true;
  uint64_t sequence = 0;
} tape;
}  // namespace

bool grad_enabled() { return tape.enabled; }
uint64_t next_sequence() { return ++tape.sequence; }
GradMode::GradMode(bool enabled) : before_(tape.enabled) { tape.enabled = enabled; }
GradMode::~GradMode() { tape.enabled = before_; }

Var::Var(Tensor value, bool requires_grad) : impl_(std::make_shared<Impl>()) {
  if (requires_grad) {
    if (!is_floating(value.dtype()))
      throw Error("[var] " + value.describe() + " cannot require a gradient: its dtype is not floating-point");
    impl_->leaf = std::make_shared<Leaf>();
    impl_->leaf->shape = value.shape();
    impl_->leaf->dtype = value.dtype();
    if (value.device() != Device::meta) impl_->leaf->arena = value.arena();
  }
  impl_->value = std::move(value);
}

Var Var::input(Tensor value) {
  Var made(std::move(value), true);
  made.impl_->leaf->transient = true;
  made.impl_->leaf->category = Category::workspace;
  return made;
}

const Tensor& Var::meta() const {
  if (!impl_) throw Error("[var] used before it was assigned a value");
  const fusion::DeferredAdd* const deferred = impl_->deferred.get();
  return !deferred ? impl_->value : deferred->sum.defined() ? deferred->sum : deferred->value;
}

const Tensor& Var::value() const {
  if (fusion::is_deferred(*this)) {
    const NoGrad no_grad;
    auto [value, addend] = fusion::take_addends(*this);
    if (addend.unique() && addend.is_contiguous()) {
      add_(addend, value);  // b + a is bitwise identical to a + b
      fusion::set_sum(*this, std::move(addend));
    } else {
      fusion::set_sum(*this, binary<Add>(value, addend));
    }
  }
  const Tensor& now = meta();
  if (!impl_->deferred) return now;
  impl_->value = now;
  impl_->deferred = nullptr;
  return impl_->value;
}

bool Var::requires_grad() const { return impl_ && (impl_->node || impl_->leaf); }
Var Var::tracked() const { return requires_grad() || !defined() ? *this : input(value()); }

Tensor Var::grad() const {
  const Leaf& leaf = GraphAccess::leaf(*this, "grad()");
  return leaf.holds == GradState::nothing ? Tensor() : leaf.grad;
}

void Var::clear_grad() {
  Leaf& leaf = GraphAccess::leaf(*this, "clear_grad()");
  leaf.holds = GradState::nothing;
  leaf.expected = 0;
  leaf.pass = Tensor();
}

void Var::set_value(Tensor value) {
  if (!impl_ || impl_->node) GraphAccess::leaf(*this, "set_value()");  // throws
  Impl& impl = *impl_;
  if (!(value.shape() == impl.value.shape()))
    throw Error("[var] new value is " + value.describe() + "; expected the parameter's shape " +
                impl.value.shape().str());
  if (impl.leaf) impl.leaf->dtype = value.dtype();
  if (impl.leaf && value.device() != Device::meta) impl.leaf->arena = value.arena();
  impl.value = std::move(value);
}

void Var::on_grad(std::function<void()> f) { GraphAccess::leaf(*this, "on_grad()").hooks.push_back(std::move(f)); }

Var Var::with_recompute(std::function<Tensor()> recompute) const {
  value();
  auto impl = std::make_shared<Impl>(*impl_);
  impl->recompute = std::move(recompute);
  return Var(std::move(impl));
}

Saved Var::saved() const {
  if (!impl_) value();  // throws
  if (impl_->read_at_backward) return Saved([impl = impl_] { return impl->value; });
  return impl_->recompute ? Saved(impl_->recompute) : Saved(value());
}

Var Var::edge() const {
  if (!impl_) return {};
  auto impl = std::make_shared<Impl>();
  impl->node = impl_->node;
  impl->output = impl_->output;
  impl->leaf = impl_->leaf;
  return Var(std::move(impl));
}

Tensor Var::take() && {
  value();
  const std::shared_ptr<Impl> impl = std::move(impl_);
  return impl.use_count() == 1 && !impl->leaf ? std::move(impl->value) : impl->value;
}

}  // namespace tessera
