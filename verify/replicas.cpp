// Serial runs of all replicas, and outer steps from their mean.
#include "verify/replicas.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

namespace tessera {
namespace {

template <class T>
struct ReplicaStep {
  T fraction, momentum, lr;
  // `sum`: differences summed over ranks; `buffer`: the momentum or null.
  void operator()(T sum, T* buffer, T& common) const {
    const T mean = fraction * sum;
    T step = mean;
    if (buffer) {
      *buffer = std::fma(momentum, *buffer, mean);
      step = std::fma(momentum, *buffer, mean);
    }
    common = std::fma(-lr, step, common);
  }
};

// Waits for a pending GPU update.
Tensor own(Reference& run, size_t unit) {
  wait_for(run.units()[unit].values.arena());
  size_t trained = 0;
  for (size_t u = 0; u < unit; ++u) trained += run.units()[u].trainable() ? 1 : 0;
  return run.optimizer().masters().at(trained);
}

}  // namespace

Replicas::Replicas(const TrainConfig& job, const Sequences& sequences, const SumOrder& order)
    : plan_(job.plan), apart_(job.plan.dp_mode == DataMode::diloco), last_(job.optim.steps) {
  for (int rank = 0; rank < (apart_ ? order.ranks : 1); ++rank) {
    SumOrder own = order;
    if (apart_) own.alone = rank;
    all_.push_back(std::make_unique<Reference>(job, sequences, own));
  }
  reports_.resize(all_.size());
  if (!apart_) return;
  const std::vector<int64_t> layers = full_model(job, sequences.vocab)->layers_of_units();
  for (size_t u = 0; u < all_[0]->units().size(); ++u) {
    const FlatUnit& unit = all_[0]->units()[u];
    if (!unit.trainable()) continue;
    const auto buffer = [&] { return Tensor::empty(unit.values.shape(), accum_dtype(unit.values.dtype()), arena_); };
    // Embeddings belong to the first layer, modules after the layers to the last one.
    const int64_t layer = std::clamp<int64_t>(layers[u], 0, job.model.layers - 1);
    Together t{.unit = u, .common = buffer(), .fragment = layer % plan_.sync_fragments};
    t.common.copy_from(unit.values);
    state_.push_back({unit.name + ".common", t.common});
    if (plan_.outer_momentum > 0) {
      t.momentum = buffer();
      t.momentum.fill(0);
      state_.push_back({unit.name + ".outer", t.momentum});
    }
    together_.push_back(t);
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

// Fragments are staggered within H steps by their index.
bool Replicas::due(int64_t fragment, int64_t step) const {
  const int64_t offset = fragment * plan_.sync_every / plan_.sync_fragments;
  return step == last_ || (step - offset) % plan_.sync_every == 0;
}

void Replicas::update() {
  for (size_t i = 0; i < all_.size(); ++i) all_[i]->update(reports_[i]);
  for (int64_t fragment = 0; apart_ && fragment < plan_.sync_fragments; ++fragment)
    if (due(fragment, reports_[0].step)) outer_step(fragment);
}

// Each pipeline rank's shard of the fragment is a flat array, without copies of tied weights, which would repeat the
// same sum.
void Replicas::outer_step(int64_t fragment) {
  const SumOrder& order = all_[0]->order();
  for (const ReductionSpan& of_rank : order.reductions) {
    std::vector<const Together*> together;
    int64_t at = 0;
    for (const SumOrder::Segment& segment : order.segments) {
      const bool here = of_rank.range.begin <= at && at < of_rank.range.end;
      at += all_[0]->units()[segment.unit].values.numel();
      for (const Together& t : together_)
        if (here && !segment.copy && t.unit == segment.unit && t.fragment == fragment) together.push_back(&t);
    }
    if (!together.empty()) outer_step(together);
  }
}

void Replicas::outer_step(const std::vector<const Together*>& together) {
  const SumOrder& order = all_[0]->order();
  int64_t size = 0;
  for (const Together* t : together) size += t->common.numel();
  std::vector<Tensor> rows;
  for (const std::unique_ptr<Reference>& run : all_) {
    rows.push_back(Tensor::empty({size}, run->trained().at(0).grads.dtype(), arena_));
    int64_t at = 0;
    for (const Together* t : together) {
      const int64_t count = t->common.numel();
      Tensor difference = own(*run, t->unit).on_host().to(t->common.dtype()).clone();
      with_floating(difference.dtype(), "replicas", [&](auto zero) {
        using T = decltype(zero);
        for (int64_t i = 0; i < count; ++i) difference.data<T>()[i] = t->common.data<T>()[i] - difference.data<T>()[i];
      });
      rows.back().narrow(0, at, count).copy_from(difference);
      at += count;
    }
  }
  const Tensor sums = sum_over(rows, {{{0, size}, size}}, order.algorithm).to(together[0]->common.dtype());
  int64_t at = 0;
  for (const Together* t : together) {
    with_floating(t->common.dtype(), "replicas", [&](auto zero) {
      using T = decltype(zero);
      const ReplicaStep<T> step{static_cast<T>(1 / static_cast<double>(all_.size())),
                                static_cast<T>(plan_.outer_momentum), static_cast<T>(plan_.outer_lr)};
      T* const momentum = t->momentum.defined() ? t->momentum.data<T>() : nullptr;
      for (int64_t i = 0; i < t->common.numel(); ++i)
        step(sums.data<T>()[at + i], momentum ? momentum + i : nullptr, t->common.data<T>()[i]);
    });
    at += t->common.numel();
    for (const std::unique_ptr<Reference>& run : all_) {
      Tensor values = run->units()[t->unit].values;
      own(*run, t->unit).copy_from(t->common);
      values.copy_from(t->common);
      ++values.storage()->version;
    }
  }
}

}  // namespace tessera
