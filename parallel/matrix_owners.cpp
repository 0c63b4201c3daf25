// Gathers shards to their owners and returns the updates.
#include "parallel/matrix_owners.h"

#include <numeric>

#include "optim/muon.h"

namespace tessera {
namespace {

constexpr int kOwnerTag = 7101;
constexpr size_t kMaxRuns = 3;  // maximum runs of a shard: queries, keys and values

// Copies between a shard of a matrix and the full matrix, run by run.
void copy(const Parameter& p, const ShardSpec& spec, const Tensor& part, const Tensor& whole, bool to_whole) {
  const ShardSpec cut = spec.is_replicated() ? ShardSpec{.dim = 0, .runs = {{0, p.whole[0]}}} : spec;
  const Tensor here = part.narrow(0, 0, cut.slice_unit(p.whole).numel()), all = whole.reshape(p.whole);
  Shape shape = p.whole;
  shape[cut.dim] = here.numel() / (p.whole.numel() / p.whole[cut.dim]);
  int64_t at = 0;
  for (const ShardSpec::Run& run : cut.runs) {
    Tensor a = here.reshape(shape).narrow(cut.dim, at, run.size), b = all.narrow(cut.dim, run.begin, run.size);
    (to_whole ? b : a).copy_from(to_whole ? a : b);
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
      cut_(strategy.layout().sharding == ShardingKind::in_shards),
      alone_(strategy.layout().sharding == ShardingKind::at_root || strategy.layout().local_updates) {
  for (const FlatUnit& unit : strategy.shards()) {
    if (!unit.trainable()) continue;
    if (unit.matrices())
      for (const Slot& slot : unit.slots)
        matrices_.push_back({shard_elements_.size(), slot, &strategy.gradient_axis(*slot.parameter)});
    shard_elements_.push_back(unit.values.numel());
  }
  share_out(strategy.shard_axis());
  if (strategy.experts_axis()) share_out(*strategy.experts_axis());
  find_parts();
}

void MatrixOwners::share_out(const Communicator& axis) {
  std::vector<int64_t> sizes;
  for (const Matrix& m : matrices_)
    if (m.axis == &axis) sizes.push_back(m.slot.parameter->whole.numel());
  const std::vector<int> owners = balanced_owners(sizes, axis.size());
  auto next = owners.begin();
  for (Matrix& m : matrices_)
    if (m.axis == &axis) m.owner = alone_ ? axis.rank() : *next++;
}

void MatrixOwners::find_parts() {
  const auto n = static_cast<size_t>(tp_.size()), width = 2 * kMaxRuns;
  std::vector<int64_t> mine(matrices_.size() * width, 0);
  for (size_t i = 0; i < matrices_.size(); ++i) {
    const std::vector<ShardSpec::Run>& runs = matrices_[i].slot.parameter->shard.runs;
    if (runs.size() > kMaxRuns) throw Error("[muon] a matrix has more than three runs per rank");
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
      m.largest = std::max(m.largest, spec.slice_unit(m.slot.parameter->whole).numel());
      m.parts.push_back(std::move(spec));
    }
  }
}

// The shard of this matrix on a rank of the data axis.
Range MatrixOwners::held(const Matrix& m, int rank) const {
  if (!cut_) return {0, m.slot.size};
  const int64_t shard = shard_elements_[m.unit], begin = m.slot.begin + (m.axis->rank() - rank) * shard;
  const auto inside = [&](int64_t at) { return std::clamp(at, int64_t{0}, m.slot.size); };
  return {inside(-begin), inside(shard - begin)};
}

// On the owner: the shard of this rank of tp, gathered over the data axis.
Tensor MatrixOwners::gathered(const Matrix& m, const Tensor& update) {
  if (!cut_) return update.narrow(0, m.slot.begin, m.slot.size);
  Tensor here = update.make({m.slot.size}, update.dtype(), Category::workspace);
  for (int rank = 0; rank < m.axis->size(); ++rank) {
    const Range range = held(m, rank);
    if (range.size() == 0) continue;
    Tensor part = here.narrow(0, range.begin, range.size());
    if (rank == m.axis->rank())
      part.copy_from(update.narrow(0, m.slot.begin + range.begin, range.size()));
    else
      m.axis->recv(part, rank, kOwnerTag);
  }
  return here;
}

void MatrixOwners::make_whole(const Matrix& m, const Tensor& here) {
  const Parameter& p = *m.slot.parameter;
  if (tp_.size() == 1 || p.shard.is_replicated()) return make_matrix_update(p, here.reshape(p.whole));
  const auto make_buffer = [&](int64_t n) { return here.make({n}, here.dtype(), Category::workspace); };
  const Tensor own = make_buffer(m.largest), all = make_buffer(m.largest * tp_.size()),
               whole = make_buffer(p.whole.numel());
  own.narrow(0, 0, here.numel()).copy_from(here);
  tp_.all_gather(own, all);
  for (int t = 0; t < tp_.size(); ++t)
    copy(p, m.parts[static_cast<size_t>(t)], all.narrow(0, t * m.largest, m.largest), whole, true);
  make_matrix_update(p, whole.reshape(p.whole));
  copy(p, m.parts[static_cast<size_t>(tp_.rank())], here, whole, false);
}

void MatrixOwners::make_updates(const std::vector<Tensor>& updates) {
  const auto mine = [&](const Matrix& m) {
    const Range range = held(m, m.axis->rank());
    return updates[m.unit].narrow(0, m.slot.begin + range.begin, range.size());
  };
  const auto is_owned = [](const Matrix& m) { return m.owner == m.axis->rank(); };
  const auto is_lent = [&](const Matrix& m) { return cut_ && !is_owned(m) && held(m, m.axis->rank()).size() > 0; };
  for (const Matrix& m : matrices_)
    if (is_lent(m)) m.axis->send(mine(m), m.owner, kOwnerTag);
  for (const Matrix& m : matrices_) {
    if (!is_owned(m)) continue;
    const Tensor here = gathered(m, updates[m.unit]);
    make_whole(m, here);
    for (int to = 0; cut_ && to < m.axis->size(); ++to) {
      const Range range = held(m, to);
      if (range.size() == 0) continue;
      const Tensor part = here.narrow(0, range.begin, range.size());
      if (to == m.axis->rank())
        mine(m).copy_from(part);
      else
        m.axis->send(part, to, kOwnerTag);
    }
  }
  for (const Matrix& m : matrices_) {
    if (is_lent(m)) m.axis->recv(mine(m), m.owner, kOwnerTag);
    if (!cut_ && !alone_) m.axis->broadcast(mine(m), m.owner);
  }
}

}  // namespace tessera
