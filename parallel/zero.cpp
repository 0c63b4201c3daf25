// ZeRO: memory, reductions and gathers of its stages.
#include "parallel/zero.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "autograd/parameter_memory.h"
#include "base/error.h"
#include "nn/units.h"
#include "tensor/ops/elementwise.h"

namespace tessera {

Zero::Zero(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options,
           const ZeroOptions& zero)
    : DataStrategy(model, axis, arena, options,
                   {.name = "zero-" + std::to_string(zero.stage),
                    .sharding = ShardingKind::in_shards,
                    .owners = axis.size(),
                    .every_microbatch = zero.stage >= 2,
                    .is_ordered = true}),
      stage_(zero.stage),
      shard_arena_(zero.shard_arena) {
  if (stage_ < 1 || stage_ > 3) throw FieldError("zero", "expected 1, 2 or 3, got " + std::to_string(stage_));
  split_axis(zero.shard_ranks > 0 ? zero.shard_ranks : axis.size());
  layout_.owners = shard_axis().size();
  for (const Module::Unit& layout : model.layout()) make_unit(layout);
  for (size_t u = 0; u < units_.size(); ++u) hook(u);
}

void Zero::make_unit(const Module::Unit& layout) {
  Unit& unit = units_.emplace_back();
  unit.layout = layout;
  unit.axis = &gradient_axis(*layout.slots[0].parameter);
  unit.shard_elements = shard_size(layout.size, unit.axis->size());
  const int64_t full_numel = unit.shard_elements * unit.axis->size(), begin = unit.shard_elements * unit.axis->rank();
  FlatUnit shard{layout.name, {}, {}, layout.slots};
  for (Slot& slot : shard.slots) slot.begin -= begin;
  if (stage_ < 3) {
    unit.values = Tensor::empty({full_numel}, layout.dtype(options_.dtype), arena_, Category::parameters);
    initialise(layout, unit.values, 0, options_.seed);
    bind_values(layout, unit.values);
    shard.values = unit.values.narrow(0, begin, unit.shard_elements);
  } else {
    const ArenaPtr& place = shard_arena_ ? shard_arena_ : arena_;
    shard.values = Tensor::empty({unit.shard_elements}, layout.dtype(options_.dtype), place, Category::parameters);
    initialise(layout, shard.values, begin, options_.seed);
    drop_values(layout, options_.dtype);
  }
  if (layout.trainable) make_gradients(unit, shard);
  residents_.push_back(stage_ == 3 ? shard : FlatUnit{layout.name, unit.values, {}, layout.slots});
  shards_.push_back(std::move(shard));
}

void Zero::make_gradients(Unit& unit, FlatUnit& shard) {
  const int64_t full_numel = unit.shard_elements * unit.axis->size();
  if (stage_ == 1) {
    unit.grads = Tensor::empty({full_numel}, options_.grad_dtype, arena_, Category::gradients);
    unit.grads.fill(0);
    bind_gradients(unit.layout, unit.grads);
    shard.grads = unit.grads.narrow(0, unit.shard_elements * unit.axis->rank(), unit.shard_elements);
  } else {
    shard.grads = Tensor::empty({unit.shard_elements}, options_.grad_dtype, arena_, Category::gradients);
    shard.grads.fill(0);
  }
  const int64_t first = layout_.reductions.empty() ? 0 : layout_.reductions.back().range.end;
  const Range all{first, first + unit.layout.size};
  layout_.reductions.push_back({all, full_numel});
  for (int64_t begin = all.begin; replicate_axis() && begin < all.end; begin += unit.shard_elements)
    layout_.between.push_back({{begin, std::min(begin + unit.shard_elements, all.end)}, unit.shard_elements});
}

void Zero::hook(size_t u) {
  for (const Slot& slot : units_[u].layout.slots) {
    if (!slot.parameter->trainable) continue;
    slot.parameter->var.on_grad(while_alive([this, u] { gradient_arrived(u); }));
    if (stage_ >= 2) provide_grad(slot.parameter->var, while_alive([this, u] { provide_gradients(u); }));
  }
  if (stage_ >= 2) units_[u].layout.module->disable_fusion();
  if (stage_ == 3) wrap(u);
}

void Zero::begin_step() {
  DataStrategy::begin_step();
  position_ = 0;
}

void Zero::begin_gradients(int64_t microbatch, UnitRange units) {
  DataStrategy::begin_gradients(microbatch, units);
  for (size_t u = units.begin; u < std::min(units.end, units_.size()); ++u) {
    units_[u].missing = std::ssize(units_[u].layout.slots);
    units_[u].reduced = !units_[u].layout.trainable;
  }
}

// Allocates all gradients of a unit when the first arrives, with zeros in gaps and padding. At most one other unit's
// reduction stays in flight; older ones are completed, which releases their memory.
void Zero::provide_gradients(size_t u) {
  while (reducing_.size() > 1) finish_first();
  Unit& unit = units_[u];
  unit.grads =
      Tensor::empty({unit.shard_elements * unit.axis->size()}, options_.grad_dtype, arena_, Category::communication);
  int64_t gap = 0;
  const auto clear_to = [&](int64_t end) { unit.grads.narrow(0, gap, end - gap).fill(0); };
  for (const Slot& slot : unit.layout.slots) {
    clear_to(slot.begin);
    gap = slot.end();
  }
  clear_to(unit.grads.numel());
  bind_gradients(unit.layout, unit.grads);
}

void Zero::gradient_arrived(size_t u) {
  if (--units_[u].missing != 0) return;
  if (stage_ >= 2 || microbatch_ + 1 == options_.microbatches) start_reducing(u);
}

void Zero::start_reducing(size_t u) {
  Unit& unit = units_[u];
  unit.reduced = true;
  const Tensor mine = shards_[u].grads;
  unit.arriving =
      stage_ == 1 || microbatch_ == 0 ? mine : mine.make({unit.shard_elements}, mine.dtype(), Category::communication);
  unit.reducing = unit.axis->start_reduce_scatter(unit.grads, unit.arriving);
  if (stage_ >= 2) {
    for (const Slot& slot : unit.layout.slots) drop_grad(slot.parameter->var);
    unit.grads = Tensor();
  }
  reducing_.push_back(u);
}

void Zero::finish_first() {
  const size_t u = reducing_.front();
  finish_reducing(u);
  if (replicate_axis() && microbatch_ + 1 == options_.microbatches)
    units_[u].summing = replicate_axis()->start_all_reduce(shards_[u].grads);
}

void Zero::finish_reducing(size_t u) {
  reducing_.pop_front();
  Unit& unit = units_[u];
  std::exchange(unit.reducing, {}).wait();
  const Tensor sum = std::exchange(unit.arriving, {});
  if (stage_ >= 2 && microbatch_ > 0) add_(shards_[u].grads, sum);
}

// Parameters without gradients get zeros; reductions complete before the next micro-batch accumulates.
void Zero::end_gradients(int64_t microbatch, UnitRange units) {
  DataStrategy::end_gradients(microbatch, units);
  const bool due = stage_ >= 2 || microbatch + 1 == options_.microbatches;
  for (size_t u = std::min(units.end, units_.size()); due && u-- > units.begin;) {
    if (units_[u].reduced) continue;
    for (const Slot& slot : units_[u].layout.slots)
      if (!slot.parameter->var.grad().defined()) zero_missing_grad(slot.parameter->var);
    start_reducing(u);
  }
  while (!reducing_.empty()) finish_first();
}

void Zero::reduce_gradients() {
  enter(Call::reduce);
  learning_ = false;
  for (size_t u = 0; u < units_.size(); ++u) {
    std::exchange(units_[u].summing, {}).wait();
    if (units_[u].copied.defined()) shard_here(u);  // the update must not overtake the copy of old values
  }
}

void Zero::gather_parameters() {
  enter(Call::gather);
  if (stage_ == 3) return;  // each use gathers them
  std::vector<Work> pending;
  for (size_t u = 0; u < units_.size(); ++u)
    if (shards_[u].trainable())
      pending.push_back(units_[u].axis->start_all_gather(shards_[u].values, units_[u].values));
  for (Work& p : pending) p.wait();
}

std::unique_ptr<DataStrategy> make_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                            const DataOptions& options, const ZeroOptions& zero) {
  return std::make_unique<Zero>(model, axis, arena, options, zero);
}

}  // namespace tessera
