// Shards: their memory, and the sums and copies between whole units and pieces.
#include "parallel/zero.h"

#include <algorithm>
#include <utility>

#include "optim/cuda/grad_norm.h"
#include "optim/grad_norm.h"
#include "tensor/ops/elementwise.h"

namespace tessera {
namespace {

int64_t piece_of(int64_t size, int ranks) { return norm_blocks((size + ranks - 1) / ranks) * kNormBlock; }

}  // namespace

Zero::Zero(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options)
    : DataStrategy(axis, options), model_(model), axis_(axis), arena_(arena), options_(options), stage_(options.zero) {
  if (stage_ < 1 || stage_ > 3) throw Error("--zero: expected 1, 2 or 3, found " + std::to_string(stage_));
  for (const Module::Unit& layout : model.layout()) make_unit(layout);
  for (size_t u = 0; u < units_.size(); ++u) hook(u);
}

std::string_view Zero::name() const { return stage_ == 1 ? "zero-1" : stage_ == 2 ? "zero-2" : "zero-3"; }

void Zero::make_unit(const Module::Unit& layout) {
  Unit& unit = units_.emplace_back();
  unit.layout = layout;
  unit.piece = piece_of(layout.size, axis_.size());
  const int64_t whole = unit.piece * axis_.size(), begin = unit.piece * axis_.rank();
  FlatUnit shard{layout.name, {}, {}, layout.slots};
  for (Slot& slot : shard.slots) slot.begin -= begin;
  if (stage_ < 3) {
    unit.values = Tensor::empty({whole}, options_.dtype, arena_, Category::parameters);
    initialise(layout, unit.values, 0, options_.seed);
    bind_values(layout, unit.values);
    shard.values = unit.values.narrow(0, begin, unit.piece);
  } else {
    shard.values = Tensor::empty({unit.piece}, options_.dtype, arena_, Category::parameters);
    initialise(layout, shard.values, begin, options_.seed);
    for (Parameter* p : layout.parameters) p->var.set_value(Tensor::meta(p->var.shape(), options_.dtype));
  }
  if (stage_ == 1) {
    unit.grads = Tensor::empty({whole}, options_.grad_dtype, arena_, Category::gradients);
    unit.grads.fill(0);
    bind_gradients(layout, unit.grads);
    shard.grads = unit.grads.narrow(0, begin, unit.piece);
  } else {
    shard.grads = Tensor::empty({unit.piece}, options_.grad_dtype, arena_, Category::gradients);
    shard.grads.fill(0);
  }
  shards_.push_back(std::move(shard));
}

void Zero::hook(size_t u) {
  for (Parameter* p : units_[u].layout.parameters) {
    p->var.on_grad([this, u] { gradient_arrived(u); });
    if (stage_ >= 2) p->var.provide_grad([this, u] { provide_gradients(u); });
  }
  if (stage_ == 3) wrap(u);
}

std::vector<FlatUnit> Zero::residents() const {
  if (stage_ == 3) return shards_;
  std::vector<FlatUnit> out;
  for (const Unit& unit : units_) out.push_back({unit.layout.name, unit.values, {}, unit.layout.slots});
  return out;
}

void Zero::begin_step() {
  model_.clear_gradients();
  position_ = 0;
}

void Zero::begin_gradients(int64_t microbatch, UnitRange units) {
  microbatch_ = microbatch;
  for (size_t u = units.begin; u < std::min(units.end, units_.size()); ++u) {
    units_[u].missing = static_cast<int64_t>(units_[u].layout.parameters.size());
    units_[u].reduced = false;
  }
}

// The first gradient of a unit has come: memory for all of them, whose gaps and padding must be zero.
void Zero::provide_gradients(size_t u) {
  Unit& unit = units_[u];
  unit.grads = Tensor::empty({unit.piece * axis_.size()}, options_.grad_dtype, arena_, Category::communication);
  int64_t gap = 0;
  const auto clear_to = [&](int64_t end) { unit.grads.narrow(0, gap, end - gap).fill(0); };
  for (const Slot& slot : unit.layout.slots) {
    clear_to(slot.begin);
    gap = slot.begin + slot.shape.numel();
  }
  clear_to(unit.grads.numel());
  bind_gradients(unit.layout, unit.grads);
}

void Zero::gradient_arrived(size_t u) {
  if (--units_[u].missing != 0) return;
  if (stage_ >= 2 || microbatch_ + 1 == options_.microbatches) start_reducing(u);
}

// One unit is on its way while the next is computed; with a third, the first is waited for.
void Zero::start_reducing(size_t u) {
  while (reducing_.size() > 1) finish_reducing(reducing_.front());
  Unit& unit = units_[u];
  unit.reduced = true;
  const Tensor mine = shards_[u].grads;
  unit.arriving =
      stage_ == 1 || microbatch_ == 0 ? mine : mine.make({unit.piece}, mine.dtype(), Category::communication);
  unit.reducing = axis_.start_reduce_scatter(unit.grads, unit.arriving);
  if (stage_ >= 2) {
    for (Parameter* p : unit.layout.parameters) p->var.drop_grad();
    unit.grads = Tensor();
  }
  reducing_.push_back(u);
}

void Zero::finish_reducing(size_t u) {
  reducing_.pop_front();
  Unit& unit = units_[u];
  std::exchange(unit.reducing, {}).wait();
  const Tensor sum = std::exchange(unit.arriving, {});
  if (stage_ >= 2 && microbatch_ > 0) add_(shards_[u].grads, sum);
}

// Parameters that no gradient reached have zeros; what is on its way arrives before the next micro-batch adds to it.
void Zero::end_gradients(int64_t microbatch, UnitRange units) {
  const bool due = stage_ >= 2 || microbatch + 1 == options_.microbatches;
  for (size_t u = std::min(units.end, units_.size()); due && u-- > units.begin;) {
    if (units_[u].reduced) continue;
    for (Parameter* p : units_[u].layout.parameters)
      if (!p->var.grad().defined()) p->var.settle_grad();
    start_reducing(u);
  }
  while (!reducing_.empty()) finish_reducing(reducing_.front());
}

// Block sums travel, so that they are added in the order of the whole units.
Zero::Blocks Zero::gather_blocks() {
  int64_t blocks = 0;
  for (const Unit& unit : units_) blocks += unit.piece / kNormBlock;
  const Tensor mine = Tensor::empty({blocks}, DType::float64, arena_, Category::workspace);
  const Tensor all = Tensor::empty({blocks * axis_.size()}, DType::float64, arena_, Category::workspace);
  std::vector<BlockRun> runs;
  int64_t at = 0;
  for (size_t u = 0; u < units_.size(); ++u) {
    const int64_t count = units_[u].piece / kNormBlock;
    block_sums(shards_[u].grads, mine.narrow(0, at, count));
    runs.push_back({.begin = at, .count = count, .times = axis_.size(), .stride = blocks});
    at += count;
  }
  axis_.all_gather(mine, all);
  return {all, std::move(runs)};
}

std::vector<double> Zero::unit_sums() {
  const Blocks blocks = gather_blocks();
  return ordered_sums(blocks.sums, blocks.of_unit);
}

Tensor Zero::unit_sums_on_gpu() {
  const Blocks blocks = gather_blocks();
  Tensor sums = Tensor::empty({static_cast<int64_t>(units_.size())}, DType::float64, arena_, Category::workspace);
  if constexpr (kWithCuda) cuda::ordered_sums(blocks.sums, blocks.of_unit, sums);
  return sums;
}

void Zero::share_parameters() {
  if (stage_ == 3) return;  // each use fetches them
  std::vector<Pending> pending;
  for (size_t u = 0; u < units_.size(); ++u)
    pending.push_back(axis_.start_all_gather(shards_[u].values, units_[u].values));
  for (Pending& p : pending) p.wait();
}

Tensor Zero::gather(size_t u, const Tensor& shard) {
  const Unit& unit = units_[u];
  const bool root = axis_.rank() == 0;
  const Shape shape{unit.piece * axis_.size()};
  const Tensor whole =
      root ? shard.make(shape, shard.dtype(), Category::workspace) : Tensor::meta(shape, shard.dtype());
  axis_.gather(shard, whole, 0);
  return root ? whole.narrow(0, 0, unit.layout.size) : Tensor();
}

Range Zero::kept(size_t u) const {
  const Unit& unit = units_[u];
  const int64_t begin = unit.piece * axis_.rank(), size = unit.layout.size;
  return {std::min(begin, size), std::min(begin + unit.piece, size)};
}

std::vector<Reduced> Zero::reductions() const {
  std::vector<Reduced> out;
  int64_t begin = 0;
  for (const Unit& unit : units_) {
    out.push_back({{begin, begin + unit.layout.size}, unit.piece * axis_.size()});
    begin += unit.layout.size;
  }
  return out;
}

}  // namespace tessera
