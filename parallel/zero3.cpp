// Stage 3: parameters are unsharded only while their unit runs.
//
//   forward:   fetch block 0 | block 0, fetch block 1 | block 1, fetch block 2 | ...
//   backward:  ... | fetch block 2 | block 2 backward, fetch block 1 | ...
//
// With shards in host memory, this rank's shard is copied to the GPU one unit earlier, overlapping with the kernels:
//
//   forward:   copy 2, fetch block 1 | block 0, copy 3, fetch block 2 | block 1, ...

#include <algorithm>
#include <utility>

#include "autograd/ops.h"
#include "autograd/parameter_memory.h"
#include "nn/units.h"
#include "parallel/zero.h"
#include "tensor/cuda/copy.h"

namespace tessera {

// Identity nodes around each use of the unit gather its values before the first backward node of the use and release
// them after the last.
void Zero::wrap(size_t u) {
  const Module::Unit& layout = units_[u].layout;
  for (const Slot& slot : layout.slots) read_at_backward(slot.parameter->var);
  layout.module->wrap(while_alive([this, u](const Module::Inner& inner, const Var& x) {
    const bool returns = grad_enabled() && x.defined();  // the backward pass needs the values again
    use(u);
    Var in = returns ? on_backward(x.tracked(), while_alive([this, u] { release(u); })) : x;
    Var y = inner(in);
    release(u);
    return returns ? on_backward(std::move(y), while_alive([this, u] { use(u); })) : y;
  }));
}

// Pinned memory is read in stream order: after the update that wrote it and before the next one.
void Zero::copy_shard(size_t u) {
  Unit& unit = units_[u];
  if (!shard_arena_ || unit.copied.defined()) return;
  const Tensor& shard = shards_[u].values;
  unit.copied = Tensor::empty({unit.shard_elements}, shard.dtype(), arena_, Category::communication);
  on_device(
      arena_->device(), [&] { unit.copied.copy_from(shard); },
      [&] { unit.copying = cuda::start_copy(unit.copied, shard.raw()); });
  ++copied_.calls;
  copied_.sent += shard.nbytes();
}

Tensor Zero::shard_here(size_t u) {
  if (!shard_arena_) return shards_[u].values;
  copy_shard(u);
  on_device(
      arena_->device(), [] {}, [&] { cuda::join_copy(units_[u].copied, std::exchange(units_[u].copying, {})); });
  return std::exchange(units_[u].copied, {});
}

void Zero::fetch(size_t u) {
  Unit& unit = units_[u];
  if (unit.values.defined()) return;
  const Tensor &mine = shards_[u].values, here = shard_here(u);
  unit.values = Tensor::empty({unit.shard_elements * unit.axis->size()}, mine.dtype(), arena_, Category::communication);
  unit.values.storage()->version = mine.storage()->version;  // invalidates packed copies after the next optimizer step
  unit.fetching = unit.axis->start_all_gather(here, unit.values);
}

void Zero::use(size_t u) {
  Unit& unit = units_[u];
  const bool training = model_.step().training && !order_.empty() && !learning_;
  if (model_.step().training && learning_) order_.push_back(u);
  fetch(u);
  std::exchange(unit.fetching, {}).wait();
  if (unit.users++ == 0) bind_values(unit.layout, unit.values);
  if (!training) return;
  ++position_;
  if (position_ < order_.size() && order_[position_] != u) fetch(order_[position_]);
  if (position_ + 1 < order_.size() && !units_[order_[position_ + 1]].values.defined())
    copy_shard(order_[position_ + 1]);
}

void Zero::release(size_t u) {
  Unit& unit = units_[u];
  if (--unit.users > 0) return;
  unit.values = Tensor();
  drop_values(unit.layout, options_.dtype);
  unit.layout.module->drop_packs();
}

}  // namespace tessera
