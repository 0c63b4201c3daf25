// Serial runs beside each other, and the step from their mean.
#include "verify/replicas.h"

#include <cmath>

#include "verify/sums_in_order.h"

namespace tessera {
namespace {

template <class T>
struct OuterStep {
  T share, momentum, rate;
  // One element: its sum of differences over ranks, the momentum or null, and the parameter.
  void operator()(T sum, T* buffer, T& common) const {
    const T mean = share * sum;
    T step = mean;
    if (buffer) {
      *buffer = std::fma(momentum, *buffer, mean);
      step = std::fma(momentum, *buffer, mean);
    }
    common = std::fma(-rate, step, common);
  }
};

}  // namespace

Replicas::Replicas(const Job& job, const Sequences& sequences, const SumOrder& order)
    : plan_(job.plan), apart_(job.plan.dp_mode == DataMode::diloco) {
  for (int rank = 0; rank < (apart_ ? order.ranks : 1); ++rank) {
    SumOrder own = order;
    if (apart_) own.alone = rank;
    all_.push_back(std::make_unique<Reference>(job, sequences, own));
  }
  reports_.resize(all_.size());
  if (!apart_) return;
  for (const FlatUnit& unit : all_[0]->trained())
    for (const char* kind : {"common", "outer"}) {
      const bool momentum = kind == std::string("outer");
      if (momentum && plan_.outer_momentum == 0) continue;
      Tensor t = Tensor::empty(unit.values.shape(), unit.values.dtype(), arena_);
      if (momentum)
        t.fill(0);
      else
        t.copy_from(unit.values);
      state_.push_back({unit.name + "." + kind, t});
    }
}

StepReport Replicas::compute_gradients() {
  double loss = 0;
  for (size_t i = 0; i < all_.size(); ++i) {
    reports_[i] = all_[i]->compute_gradients();
    loss = i == 0 ? all_[i]->loss_sum() : loss + all_[i]->loss_sum();
  }
  StepReport report = reports_[0];
  report.loss = loss / all_[0]->step_targets();
  return report;
}

void Replicas::update() {
  for (size_t i = 0; i < all_.size(); ++i) all_[i]->update(reports_[i]);
  if (apart_ && reports_[0].step % plan_.sync_every == 0) outer_step();
}

Tensor Replicas::common_of(const FlatUnit& unit) const {
  for (const NamedTensor& t : state_)
    if (t.name == unit.name + ".common") return t.tensor;
  return {};
}

// All differences in a row, as the plan sums them; each use of a tied weight that it has a copy of has its own there.
void Replicas::outer_step() {
  const SumOrder& order = all_[0]->order();
  int64_t size = 0;
  for (const SumOrder::Part& part : order.parts) size += all_[0]->units()[part.unit].values.numel();
  const DType dtype = all_[0]->trained().at(0).values.dtype();
  with_floating(dtype, "replicas", [&](auto t) {
    using T = decltype(t);
    std::vector<Tensor> rows;
    for (const std::unique_ptr<Reference>& one : all_) {
      rows.push_back(Tensor::empty({size}, dtype, arena_));
      T* to = rows.back().data<T>();
      for (const SumOrder::Part& part : order.parts) {
        const FlatUnit& unit = one->units()[part.unit];
        const T *const common = common_of(unit).data<T>(), *const own = unit.values.data<T>();
        for (int64_t i = 0; i < unit.values.numel(); ++i) *to++ = common[i] - own[i];
      }
    }
    const Tensor sums = sum_over(rows, order.reductions, order.algorithm);
    const auto n = static_cast<double>(all_.size());
    const OuterStep<T> step{static_cast<T>(1 / n), static_cast<T>(plan_.outer_momentum),
                            static_cast<T>(plan_.outer_lr)};
    const T* sum = sums.data<T>();
    for (const SumOrder::Part& part : order.parts) {
      const FlatUnit& unit = all_[0]->units()[part.unit];
      T *const common = common_of(unit).data<T>(), *momentum = nullptr;
      for (const NamedTensor& s : state_)
        if (s.name == unit.name + ".outer") momentum = s.tensor.data<T>();
      for (int64_t i = 0; i < unit.values.numel(); ++i, ++sum)
        if (!part.copy) step(*sum, momentum ? momentum + i : nullptr, common[i]);
    }
    for (const std::unique_ptr<Reference>& one : all_)
      for (const FlatUnit& unit : one->trained()) {
        Tensor values = unit.values;
        values.copy_from(common_of(unit));
        ++values.storage()->version;
      }
  });
}

}  // namespace tessera
