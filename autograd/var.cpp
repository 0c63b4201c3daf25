// Handles, leaves and recording.
#include "autograd/var.h"

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

const Tensor& Var::like() const {
  if (!impl_) throw Error("[var] used before it was assigned a value");
  const DeferredAdd* const deferred = impl_->deferred.get();
  return !deferred ? impl_->value : deferred->sum.defined() ? deferred->sum : deferred->value;
}
const Tensor& Var::value() const {
  if (is_deferred()) {
    const NoGrad no_grad;
    auto [value, addend] = take_addends();
    if (addend.unique() && addend.is_contiguous()) {
      add_(addend, value);  // b + a is bitwise identical to a + b
      set_sum(std::move(addend));
    } else {
      set_sum(binary<Add>(value, addend));
    }
  }
  const Tensor& now = like();
  if (!impl_->deferred) return now;
  impl_->value = now;
  impl_->deferred = nullptr;
  return impl_->value;
}

void Var::defer_add(Tensor addend) const {
  impl_->deferred = std::make_shared<DeferredAdd>(DeferredAdd{std::exchange(impl_->value, {}), std::move(addend)});
}
bool Var::is_deferred() const { return impl_ && impl_->deferred && !impl_->deferred->sum.defined(); }
Var::Terms Var::take_addends() const {
  if (!is_deferred()) return {value(), {}};
  return {std::exchange(impl_->deferred->value, {}), std::exchange(impl_->deferred->addend, {})};
}
void Var::set_sum(Tensor sum) const { impl_->deferred->sum = std::move(sum); }
void Var::share_value(const Var& x) const {
  impl_->value = x.impl_->value;
  impl_->deferred = x.impl_->deferred;
}
void Var::request_row_sums() const {
  if (!impl_) value();  // throws
  if (impl_->node) impl_->node->row_sums_requested = true;
}
void Var::require_row_sums() const {
  if (!impl_) value();  // throws
  if (impl_->node) impl_->node->row_sums_required = true;
}
bool Var::row_sums_requested() const { return impl_ && impl_->node && impl_->node->row_sums_requested; }

bool Var::requires_grad() const { return impl_ && (impl_->node || impl_->leaf); }
Var Var::tracked() const { return requires_grad() || !defined() ? *this : input(value()); }
bool Var::is_leaf() const { return impl_ && !impl_->node; }

Var::Impl& Var::leaf_impl(const char* what) const {
  if (!impl_ || !impl_->leaf)
    throw Error(std::string("[var] ") + what + " requires a leaf that requires a gradient (a parameter)");
  return *impl_;
}

Tensor Var::grad() const {
  const Leaf& leaf = *leaf_impl("grad()").leaf;
  return leaf.holds == GradState::nothing ? Tensor() : leaf.grad;
}

void Var::set_grad_buffer(Tensor buffer) {
  Leaf& leaf = *leaf_impl("set_grad_buffer()").leaf;
  if (!(buffer.shape() == leaf.shape))
    throw Error("[var] gradient buffer is " + buffer.describe() + "; expected the parameter's shape " +
                leaf.shape.str());
  leaf.reclaim_buffer();
  leaf.grad = std::move(buffer);
  leaf.holds = GradState::nothing;
}

void Var::clear_grad() {
  Leaf& leaf = *leaf_impl("clear_grad()").leaf;
  leaf.holds = GradState::nothing;
  leaf.expected = 0;
  leaf.pass = Tensor();
}

void Var::zero_missing_grad() {
  Leaf& leaf = *leaf_impl("zero_missing_grad()").leaf;
  if (leaf.holds == GradState::nothing) leaf.settle();
}

void Var::set_value(Tensor value) {
  Impl& impl = is_leaf() ? *impl_ : leaf_impl("set_value()");
  if (!(value.shape() == impl.value.shape()))
    throw Error("[var] new value is " + value.describe() + "; expected the parameter's shape " +
                impl.value.shape().str());
  if (impl.leaf) impl.leaf->dtype = value.dtype();
  if (impl.leaf && value.device() != Device::meta) impl.leaf->arena = value.arena();
  impl.value = std::move(value);
}

void Var::provide_grad(std::function<void()> provide) {
  Leaf& leaf = *leaf_impl("provide_grad()").leaf;
  leaf.provide = std::move(provide);
  drop_grad();
}

void Var::drop_grad() {
  Leaf& leaf = *leaf_impl("drop_grad()").leaf;
  leaf.reclaim_buffer();
  leaf.grad = Tensor();
  leaf.holds = GradState::nothing;
}

void Var::read_at_backward() { (is_leaf() ? *impl_ : leaf_impl("read_at_backward()")).read_at_backward = true; }

void Var::on_grad(std::function<void()> f) { leaf_impl("on_grad()").leaf->hooks.push_back(std::move(f)); }

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

std::shared_ptr<PrecomputedGrad> Var::precomputed_grad(DType wide) const {
  auto early = std::make_shared<PrecomputedGrad>();
  Leaf* const leaf = impl_->leaf.get();
  const bool free = leaf && !leaf->transient && leaf->holds == GradState::nothing && leaf->grad.defined() &&
                    leaf->grad.dtype() == wide && leaf->grad.is_contiguous() && leaf->lent.expired();
  early->at = free ? leaf->grad : value().make(shape(), wide, Category::workspace);
  if (free) leaf->lent = early;
  return early;
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

// Ops write gradients in the value's dtype or in float32; for a buffer of another dtype they are rounded.
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
  GradTarget at = place();
  const Tensor one = at.adds ? at.to.make(shape, at.to.dtype(), Category::workspace) : at.to;
  write_fresh(one, write);
  if (at.adds) add_(at.to, one);
  gradient_done();
}

GradTarget Leaf::place() {
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
void Leaf::receive(const std::shared_ptr<PrecomputedGrad>& early) {
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

std::vector<Var> record(const char* op, std::vector<Tensor> outputs, const std::vector<Var>& inputs,
                        std::function<void(Grads&)> vjp) {
  bool wanted = false;
  for (const Var& in : inputs) wanted = wanted || in.requires_grad();
  std::shared_ptr<Node> node;
  if (wanted && grad_enabled()) {
    node = std::make_shared<Node>();
    node->op = op;
    node->sequence = next_sequence();
    node->vjp = std::move(vjp);
    node->arena = outputs[0].arena();
    for (const Var& in : inputs) {
      node->inputs.push_back(in.impl_ ? Edge{in.impl_->node, in.impl_->output, in.impl_->leaf} : Edge{});
      const bool present = in.impl_ && (in.impl_->value.defined() || in.impl_->deferred);
      node->input_shapes.push_back(present ? in.shape() : Shape{});
      node->input_dtypes.push_back(present ? in.dtype() : DType::float32);
    }
    node->output_grads.resize(outputs.size());
    for (const Tensor& t : outputs) node->output_shapes.push_back(t.shape());
  }
  std::vector<Var> vars;
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto impl = std::make_shared<Var::Impl>();
    impl->value = std::move(outputs[i]);
    impl->node = node;
    impl->output = static_cast<int>(i);
    vars.push_back(Var(std::move(impl)));
  }
  return vars;
}

}  // namespace tessera
