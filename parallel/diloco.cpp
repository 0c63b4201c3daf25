// DiLoCo (Douillard et al. 2023, arXiv 2311.08105), and local SGD (Stich 2018, "Local SGD converges fast and
// communicates little"): replicas train independently and synchronize only every H steps.
//
//   step          1     2   ...   H                        H+1
//   rank 0   |  inner inner ... inner  --+             +-- inner ...
//   rank 1   |  inner inner ... inner  --+-- outer ----+-- inner ...       outer: all-reduce of (common - own), then
//   rank 2   |  inner inner ... inner  --+             +-- inner ...       one step from `common` along its mean
//
//   delta = mean over ranks of (common - own)         momentum = mu momentum + delta
//   common = common - outer_lr (delta + mu momentum)  own = common     (Nesterov; Sutskever et al. 2013)
//
// With P fragments (Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512, strided) each fragment synchronizes
// every H steps, at different steps (SyncSteps), so about 1 / P of the parameters are sent at a time; here H = 4, P =
// 2:
//
//   step          1     2     3     4     5     6     7     8 (the last)
//   fragment 0                      o                       o
//   fragment 1          o                       o           o
//
// placements     parameters, gradients and optimizer state are local to each rank; common and momentum are I
// memory/rank    DDP's, plus 8 bytes per parameter: common and momentum in fp32 (4 if mu is 0)
// volume/rank    2 (n - 1) / n of the parameters, every H steps, in the dtype of gradients
//
// `own` is the tensor that the optimizer updates: the fp32 masters under bfloat16. Differences are computed in fp32
// (fp64 for fp64), rounded once to the gradient dtype, and reduced in the gradient buffer. A rank's gradient is the
// mean over its own sequences and is clipped by its own norm. Inner SGD with outer rate 1 and no outer momentum is
// local SGD; with H = 1 it equals DDP up to rounding. With context parallelism a replica is a group of context ranks,
// which sum gradients in every step; each makes outer steps with the ranks of the same index in the other groups.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "parallel/data_strategy.h"
#include "parallel/outer_step.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/ops/elementwise.h"

namespace tessera {

bool SyncSteps::all_due(int64_t step) const {
  int64_t fragment = 0;
  while (fragment < fragments && due(fragment, step)) ++fragment;
  return fragment == fragments;
}

int64_t SyncSteps::count(int64_t fragment, int64_t steps) const {
  int64_t found = 0;
  for (int64_t step = next(fragment, 0); step <= steps; step = next(fragment, step)) ++found;
  return found;
}

int64_t SyncSteps::first() const {
  int64_t step = next(0, 0);
  for (int64_t fragment = 1; fragment < fragments; ++fragment) step = std::min(step, next(fragment, 0));
  return step;
}

class Diloco final : public DataStrategy {
 public:
  Diloco(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options,
         const DilocoOptions& diloco);

  void begin_step() override;
  void reduce_gradients() override;
  void gather_parameters() override;
  bool agrees() const override { return steps_ == 0 || diloco_.sync.all_due(steps_); }

 private:
  struct Synced {  // a trained unit; momentum is undefined if its factor is 0
    Tensor values, common, momentum;
    int64_t fragment = 0;
  };
  void outer_step(int64_t fragment);
  Tensor own(size_t i) const { return masters_.empty() ? synced_[i].values : masters_[i]; }

  DilocoOptions diloco_;
  Tensor grads_;
  std::vector<Synced> synced_;
};

namespace {

// O is the dtype of `own`, G the gradient dtype, W the compute dtype.
template <class F>
void over(const Tensor& own, const Tensor& sums, const F& f) {
  with_floating(own.dtype(), "diloco", [&](auto o) {
    with_floating(sums.dtype(), "diloco", [&](auto g) {
      auto* const owns = own.data<decltype(o)>();
      auto* const gs = sums.data<decltype(g)>();
      cpu::split(own.numel(), cpu::kGrain,
                 [&](int64_t begin, int64_t end) { f(Accumulate<decltype(o)>{}, owns, gs, begin, end); });
    });
  });
}

void make_differences(const Tensor& sums, const Tensor& common, const Tensor& own) {
  const auto on_cpu = [&] {
    over(own, sums, [&](auto w, const auto* owns, auto* g, int64_t begin, int64_t end) {
      using W = decltype(w);
      const W* const commons = common.data<W>();
      for (int64_t i = begin; i < end; ++i)
        g[i] = converted<std::remove_pointer_t<decltype(g)>>(commons[i] - static_cast<W>(owns[i]));
    });
  };
  on_device(sums.device(), on_cpu, [&] { cuda::differences(sums, common, own); });
}

void step_together(const Tensor& common, const Tensor& momentum, const Tensor& own, const Tensor& sums,
                   const OuterStep<double>& step) {
  const auto on_cpu = [&] {
    over(own, sums, [&](auto w, auto* owns, const auto* g, int64_t begin, int64_t end) {
      using W = decltype(w);
      const OuterStep<W> outer = step.as<W>();
      W* const commons = common.data<W>();
      W* const buffer = momentum.defined() ? momentum.data<W>() : nullptr;
      for (int64_t i = begin; i < end; ++i) {
        outer(static_cast<W>(g[i]), buffer ? buffer + i : nullptr, commons[i]);
        owns[i] = converted<std::remove_pointer_t<decltype(owns)>>(commons[i]);
      }
    });
  };
  on_device(sums.device(), on_cpu, [&] { cuda::outer_step(common, momentum, own, sums, step); });
}

}  // namespace

Diloco::Diloco(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options,
               const DilocoOptions& diloco)
    : DataStrategy(model, axis, arena, options, {.name = "diloco", .is_ordered = true}), diloco_(diloco) {
  check_group(diloco.context);
  check_group(diloco.replicas);
  const FlatBuffer all = make_flat_buffer(Category::parameters, Category::gradients);
  grads_ = all.grads;
  shards_ = residents_;
  const auto make_state = [&] {
    return Tensor::empty(all.values.shape(), accum_dtype(options.dtype), arena, Category::optimizer);
  };
  Tensor common = make_state(), momentum;
  common.copy_from(all.values);
  state_kinds_.emplace_back("common");
  if (diloco.outer.momentum > 0) {
    momentum = make_state();
    momentum.fill(0);
    state_kinds_.emplace_back("outer");
  }
  int64_t begin = 0;
  for (size_t u = 0; u < residents_.size(); ++u) {
    const FlatUnit& unit = residents_[u];
    if (!unit.trainable()) continue;
    const int64_t size = unit.values.numel();
    Synced synced{unit.values, common.narrow(0, begin, size), {}, diloco.fragments.empty() ? 0 : diloco.fragments[u]};
    state_.push_back({unit.name + ".common", synced.common});
    if (momentum.defined()) {
      synced.momentum = momentum.narrow(0, begin, size);
      state_.push_back({unit.name + ".outer", synced.momentum});
    }
    synced_.push_back(std::move(synced));
    begin += size;
  }
  layout_.reductions = {{{0, begin}, begin}};
  layout_.local_updates = true;
}

// If no `common` was saved, the loaded values initialize it.
void Diloco::begin_step() {
  DataStrategy::begin_step();
  for (size_t i = 0; steps_ == 0 && i < synced_.size(); ++i) synced_[i].common.copy_from(own(i));
}

void Diloco::reduce_gradients() {
  enter(Call::reduce);
  model_.zero_missing_gradients();
  if (diloco_.context) diloco_.context->all_reduce(grads_);
  scale_(grads_, copies());
}

void Diloco::gather_parameters() {
  enter(Call::gather);
  ++steps_;
  for (int64_t fragment = 0; fragment < diloco_.sync.fragments; ++fragment)
    if (diloco_.sync.due(fragment, steps_)) outer_step(fragment);
}

// Differences are packed from the beginning of the gradient buffer, which is free after the inner step. They also
// overwrite the gaps between gradients, so the buffer is zeroed afterwards.
void Diloco::outer_step(int64_t fragment) {
  int64_t size = 0;
  // Calls f with each unit of the fragment, the tensor to update, and its range of the gradient buffer.
  const auto each = [&](const auto& f) {
    int64_t begin = 0;
    for (size_t i = 0; i < synced_.size(); ++i) {
      if (synced_[i].fragment != fragment) continue;
      const int64_t count = synced_[i].values.numel();
      f(synced_[i], own(i), grads_.narrow(0, begin, count));
      begin += count;
    }
    size = begin;
  };
  each([](const Synced& synced, const Tensor& own, const Tensor& sums) { make_differences(sums, synced.common, own); });
  if (size == 0) return;  // other pipeline ranks have all units of the fragment
  (diloco_.replicas ? *diloco_.replicas : axis_).all_reduce(grads_.narrow(0, 0, size));
  const OuterStep<double> step = make_outer_step(copies(), diloco_.outer);
  each([&](Synced& synced, const Tensor& own, const Tensor& sums) {
    step_together(synced.common, synced.momentum, own, sums, step);
    if (own.dtype() != synced.values.dtype()) synced.values.copy_from(synced.common);
    ++synced.values.storage()->version;
  });
  grads_.narrow(0, 0, size).fill(0);
}

std::unique_ptr<DataStrategy> make_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                            const DataOptions& options, const DilocoOptions& diloco) {
  return std::make_unique<Diloco>(model, axis, arena, options, diloco);
}

}  // namespace tessera
