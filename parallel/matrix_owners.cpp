// Gathers a matrix's shards to its owner and returns the updates.
#include "parallel/matrix_owners.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "optim/muon.h"

namespace tessera {
namespace {

constexpr int kOwnerTag = 7101;
constexpr size_t kMaxRuns = 3;  // queries, keys and values

void copy(const Parameter& p, const ShardSpec& spec, const Tensor& shard, const Tensor& full, bool to_full) {
  const ShardSpec split = spec.is_replicated() ? ShardSpec{.dim = 0, .runs = {{0, p.full_shape[0]}}} : spec;
  const Tensor here = shard.narrow(0, 0, split.slice_unit(p.full_shape).numel()), all = full.reshape(p.full_shape);
  Shape shape = p.full_shape;
  shape[split.dim] = here.numel() / (p.full_shape.numel() / p.full_shape[split.dim]);
  int64_t at = 0;
  for (const ShardSpec::Run& run : split.runs) {
    Tensor a = here.reshape(shape).narrow(split.dim, at, run.size), b = all.narrow(split.dim, run.begin, run.size);
    (to_full ? b : a).copy_from(to_full ? a : b);
    at += run.size;
  }
}

}  // namespace

std::vector<int> balanced_owners(std::span<const int64_t> sizes, int ranks) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  std::vector<int64_t> loads(static_cast<size_t>(ranks), 0);
  std::vector<int> owners(sizes.size(), 0);
  for (const size_t i : order) {
    const auto smallest = std::ranges::min_element(loads);
    *smallest += sizes[i];
    owners[i] = static_cast<int>(smallest - loads.begin());
  }
  return owners;
}

MatrixOwners::MatrixOwners(const DataStrategy& strategy, Communicator& tp)
    : tp_(tp),
      sharded_(strategy.layout().sharding == ShardingKind::in_shards),
      independent_(strategy.layout().sharding == ShardingKind::at_root || strategy.layout().local_updates) {
  for (const FlatUnit& unit : strategy.shards()) {
    if (!unit.trainable()) continue;
    if (unit.matrices())
      for (const Slot& slot : unit.slots)
        matrices_.push_back({shard_elements_.size(), slot, &strategy.gradient_axis(*slot.parameter)});
    shard_elements_.push_back(unit.values.numel());
  }
  assign_owners(strategy.shard_axis());
  if (strategy.experts_axis()) assign_owners(*strategy.experts_axis());
  exchange_shards();
}

void MatrixOwners::assign_owners(const Communicator& axis) {
  std::vector<int64_t> sizes;
  for (const Matrix& m : matrices_)
    if (m.axis == &axis) sizes.push_back(m.slot.parameter->full_shape.numel());
  const std::vector<int> owners = balanced_owners(sizes, axis.size());
  auto next = owners.begin();
  for (Matrix& m : matrices_)
    if (m.axis == &axis) m.owner = independent_ ? axis.rank() : *next++;
}

void MatrixOwners::exchange_shards() {
  const auto n = static_cast<size_t>(tp_.size()), width = 2 * kMaxRuns;
  std::vector<int64_t> mine(matrices_.size() * width, 0);
  for (size_t i = 0; i < matrices_.size(); ++i) {
    const std::vector<ShardSpec::Run>& runs = matrices_[i].slot.parameter->shard.runs;
    if (runs.size() > kMaxRuns) throw Error("[muon] a matrix shard has more than three contiguous runs");
    for (size_t r = 0; r < runs.size(); ++r) {
      mine[i * width + 2 * r] = runs[r].begin;
      mine[i * width + 2 * r + 1] = runs[r].size;
    }
  }
  const ArenaPtr host = make_arena();
  const Tensor own = Tensor::of<int64_t>(mine, {std::ssize(mine)}, host);
  const Tensor all = Tensor::empty({std::ssize(mine) * tp_.size()}, DType::int64, host);
  if (!mine.empty()) tp_.all_gather(own, all);
  for (size_t i = 0; i < matrices_.size(); ++i) {
    Matrix& m = matrices_[i];
    for (size_t t = 0; t < n; ++t) {
      ShardSpec spec{.dim = m.slot.parameter->shard.dim};
      const int64_t* run = all.data<int64_t>() + t * mine.size() + i * width;
      for (size_t r = 0; r < kMaxRuns; ++r, run += 2)
        if (run[1] > 0) spec.runs.push_back({run[0], run[1]});
      m.largest = std::max(m.largest, spec.slice_unit(m.slot.parameter->full_shape).numel());
      m.shards.push_back(std::move(spec));
    }
  }
}

// The range that a rank of the data axis stores.
Range MatrixOwners::stored(const Matrix& m, int rank) const {
  if (!sharded_) return {0, m.slot.size};
  const int64_t shard = shard_elements_[m.unit], begin = m.slot.begin + (m.axis->rank() - rank) * shard;
  const auto inside = [&](int64_t at) { return std::clamp(at, int64_t{0}, m.slot.size); };
  return {inside(-begin), inside(shard - begin)};
}

// On the owner: the matrix's shard on this tp rank, gathered over the data axis.
Tensor MatrixOwners::gathered(const Matrix& m, const Tensor& update) {
  if (!sharded_) return update.narrow(0, m.slot.begin, m.slot.size);
  Tensor here = update.make({m.slot.size}, update.dtype(), Category::workspace);
  for (int rank = 0; rank < m.axis->size(); ++rank) {
    const Range range = stored(m, rank);
    if (range.size() == 0) continue;
    Tensor shard = here.narrow(0, range.begin, range.size());
    if (rank == m.axis->rank())
      shard.copy_from(update.narrow(0, m.slot.begin + range.begin, range.size()));
    else
      m.axis->recv(shard, rank, kOwnerTag);
  }
  return here;
}

void MatrixOwners::update_full(const Matrix& m, const Tensor& here) {
  const Parameter& p = *m.slot.parameter;
  if (tp_.size() == 1 || p.shard.is_replicated()) return make_matrix_update(p, here.reshape(p.full_shape));
  const auto make_buffer = [&](int64_t n) { return here.make({n}, here.dtype(), Category::workspace); };
  const Tensor own = make_buffer(m.largest), all = make_buffer(m.largest * tp_.size()),
               full = make_buffer(p.full_shape.numel());
  own.narrow(0, 0, here.numel()).copy_from(here);
  tp_.all_gather(own, all);
  for (int t = 0; t < tp_.size(); ++t)
    copy(p, m.shards[static_cast<size_t>(t)], all.narrow(0, t * m.largest, m.largest), full, true);
  make_matrix_update(p, full.reshape(p.full_shape));
  copy(p, m.shards[static_cast<size_t>(tp_.rank())], here, full, false);
}

void MatrixOwners::make_updates(const std::vector<Tensor>& updates) {
  const auto mine = [&](const Matrix& m) {
    const Range range = stored(m, m.axis->rank());
    return updates[m.unit].narrow(0, m.slot.begin + range.begin, range.size());
  };
  const auto is_owned = [](const Matrix& m) { return m.owner == m.axis->rank(); };
  const auto sends = [&](const Matrix& m) { return sharded_ && !is_owned(m) && stored(m, m.axis->rank()).size() > 0; };
  for (const Matrix& m : matrices_)
    if (sends(m)) m.axis->send(mine(m), m.owner, kOwnerTag);
  for (const Matrix& m : matrices_) {
    if (!is_owned(m)) continue;
    const Tensor here = gathered(m, updates[m.unit]);
    update_full(m, here);
    for (int to = 0; sharded_ && to < m.axis->size(); ++to) {
      const Range range = stored(m, to);
      if (range.size() == 0) continue;
      const Tensor shard = here.narrow(0, range.begin, range.size());
      if (to == m.axis->rank())
        mine(m).copy_from(shard);
      else
        m.axis->send(shard, to, kOwnerTag);
    }
  }
  for (const Matrix& m : matrices_) {
    if (sends(m)) m.axis->recv(mine(m), m.owner, kOwnerTag);
    if (!sharded_ && !independent_) m.axis->broadcast(mine(m), m.owner);
  }
}

}  // namespace tessera
