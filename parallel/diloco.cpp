// Gradients of a rank alone, and the step that all make together.
#include "parallel/diloco.h"

#include "optim/segments.h"
#include "tensor/field_error.h"
#include "tensor/math.h"
#include "tensor/ops/elementwise.h"

namespace tessera {
namespace {

// Runs f(T*, begin, end) over the elements of a tensor, in its type and on this rank's threads.
template <class F>
void over(const Tensor& x, const F& f) {
  with_wide(x, [&](auto t) {
    auto* const data = x.data<decltype(t)>();
    cpu::split(x.numel(), cpu::kGrain, [&](int64_t begin, int64_t end) { f(data, begin, end); });
  });
}

}  // namespace

Diloco::Diloco(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options)
    : DataStrategy(model, axis, arena, options, {.name = "diloco"}) {
  if (options.dtype == DType::bfloat16 || options.grad_dtype != options.dtype)
    throw FieldError("dp_mode", "diloco is for parameters and gradients of one dtype, fp32 or fp64");
  all_ = make_stretch(Category::parameters, Category::gradients);
  shards_ = residents_;
  common_ = Tensor::empty(all_.values.shape(), options.dtype, arena, Category::optimizer);
  common_.copy_from(all_.values);
  if (options.outer_momentum > 0) {
    momentum_ = Tensor::empty(all_.values.shape(), options.dtype, arena, Category::optimizer);
    momentum_.fill(0);
  }
  state_kinds_.emplace_back("common");
  if (momentum_.defined()) state_kinds_.emplace_back("outer");
  int64_t begin = 0;
  for (const FlatUnit& unit : residents_) {
    if (!unit.trainable()) continue;
    const int64_t size = unit.values.numel();
    for (const std::string& kind : state_kinds_)
      state_.push_back({unit.name + "." + kind, (kind == "common" ? common_ : momentum_).narrow(0, begin, size)});
    begin += size;
  }
  layout_.reductions = {{{0, begin}, begin}};
  layout_.apart = true;
}

// What was read since, into values alone, is what ranks have in common too.
void Diloco::begin_step() {
  DataStrategy::begin_step();
  if (agrees()) common_.copy_from(all_.values);
}

// Parameters that no gradient reached have zeros.
void Diloco::finish_gradients() {
  model_.zero_missing_gradients();
  scale_(all_.grads, axis_.size());
}

void Diloco::share_parameters() {
  ++steps_;
  if (agrees()) outer_step();
}

// The gradients are not needed any more: their memory takes the differences.
void Diloco::outer_step() {
  over(all_.grads, [&](auto* g, int64_t begin, int64_t end) {
    using T = std::remove_pointer_t<decltype(g)>;
    const T *const common = common_.data<T>(), *const own = all_.values.data<T>();
    for (int64_t i = begin; i < end; ++i) g[i] = common[i] - own[i];
  });
  axis_.all_reduce(all_.grads);
  over(all_.grads, [&](auto* g, int64_t begin, int64_t end) {
    using T = std::remove_pointer_t<decltype(g)>;
    const auto share = static_cast<T>(1.0 / axis_.size()), mu = static_cast<T>(options_.outer_momentum),
               rate = static_cast<T>(options_.outer_lr);
    T *const common = common_.data<T>(), *const own = all_.values.data<T>();
    T* const momentum = momentum_.defined() ? momentum_.data<T>() : nullptr;
    for (int64_t i = begin; i < end; ++i) {
      T step = share * g[i];
      if (momentum) {
        momentum[i] = math::fma(mu, momentum[i], step);
        step = math::fma(mu, momentum[i], step);
      }
      own[i] = common[i] = math::fma(-rate, step, common[i]);
    }
  });
  ++all_.values.storage()->version;
}

}  // namespace tessera
