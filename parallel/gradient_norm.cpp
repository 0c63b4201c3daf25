// Exchange of block sums.
#include "parallel/gradient_norm.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "optim/grad_norm.h"
#include "tensor/ops/elementwise.h"

namespace tessera {
namespace {

Tensor allocate_sums(const DataStrategy& s, int64_t count) {
  return Tensor::empty({count}, DType::float64, s.arena(), Category::workspace);
}

// Sums of squares of this rank's shards. With `tp`, each slot that this rank counts has separate norm blocks.
Tensor squares_of_own(const DataStrategy& s, const Communicator* tp) {
  std::vector<Tensor> parts;
  std::vector<BlockRun> runs;
  for (const FlatUnit& shard : s.shards()) {
    const auto before = std::ssize(parts);
    if (!tp && shard.trainable()) parts.push_back(shard.grads);
    for (const Slot& slot : shard.slots) {
      if (!tp || !shard.trainable()) break;
      const int64_t from = std::max(slot.begin, int64_t{0}), to = std::min(slot.end(), shard.grads.numel());
      const bool counts = tp->rank() == 0 || slot.parameter->shard.axis == tp->axis();
      if (from < to && counts) parts.push_back(shard.grads.narrow(0, from, to - from));
    }
    runs.push_back({.begin = before, .count = std::ssize(parts) - before});
  }
  if (!tp && !parts.empty() && parts.size() == runs.size()) return sums_of_squares(parts);
  Tensor sums = allocate_sums(s, std::ssize(s.layout().sizes));
  if (parts.empty())
    sums.fill(0);
  else
    ordered_sums(sums_of_squares(parts), runs, sums);
  return sums;
}

int64_t count_blocks(const FlatUnit& unit, int64_t elements) { return unit.trainable() ? norm_blocks(elements) : 0; }

// All ranks of the axis have the same number of blocks of a unit, which may be zero.
Tensor squares_of_shards(const DataStrategy& s, Communicator& axis, const std::vector<int64_t>& blocks) {
  const int64_t here = std::accumulate(blocks.begin(), blocks.end(), int64_t{0});
  const Tensor mine = allocate_sums(s, here), all = allocate_sums(s, here * axis.size());
  std::vector<BlockRun> runs;
  int64_t at = 0;
  for (size_t u = 0; u < blocks.size(); ++u) {
    if (blocks[u] > 0) block_sums(s.shards()[u].grads, mine.narrow(0, at, blocks[u]));
    runs.push_back({.begin = at, .count = blocks[u], .times = axis.size(), .stride = here});
    at += blocks[u];
  }
  axis.all_gather(mine, all);
  Tensor sums = allocate_sums(s, std::ssize(runs));
  ordered_sums(all, runs, sums);
  return sums;
}

Tensor squares_along_axes(const DataStrategy& s) {
  const auto along = [&](Communicator& axis) {
    std::vector<int64_t> blocks;
    for (const FlatUnit& shard : s.shards())
      blocks.push_back(&s.gradient_axis(*shard.slots[0].parameter) == &axis ? count_blocks(shard, shard.values.numel())
                                                                            : 0);
    return squares_of_shards(s, axis, blocks);
  };
  Tensor sums = along(s.shard_axis());
  const bool learn = std::ranges::any_of(
      s.shards(), [](const FlatUnit& shard) { return shard.trainable() && shard.slots[0].parameter->is_expert; });
  if (s.experts_axis() && learn) add_(sums, along(*s.experts_axis()));
  return sums;
}

Tensor squares_of_owners(const DataStrategy& s) {
  Communicator& axis = s.axis();
  const DataLayout& layout = s.layout();
  const auto blocks = [&](size_t unit, int owner) {
    return count_blocks(s.shards()[unit], shard_range(layout.sizes[unit], layout.owners, owner).size());
  };
  std::vector<int64_t> begins{0};
  for (int k = 0; k < layout.owners; ++k) {
    begins.push_back(begins.back());
    for (size_t u = 0; u < layout.sizes.size(); ++u) begins.back() += blocks(u, k);
  }
  const Tensor sums = allocate_sums(s, begins.back());
  if (axis.rank() < layout.owners)
    for (int64_t at = begins[static_cast<size_t>(axis.rank())]; const FlatUnit& shard : s.shards()) {
      const int64_t own = count_blocks(shard, shard.values.numel());
      if (own > 0) block_sums(shard.grads, sums.narrow(0, at, own));
      at += own;
    }
  for (int k = 0; k < layout.owners; ++k) {
    const int64_t begin = begins[static_cast<size_t>(k)], count = begins[static_cast<size_t>(k) + 1] - begin;
    if (count > 0) axis.broadcast(sums.narrow(0, begin, count), k);
  }
  const Tensor here = sums.on_host();
  std::vector<double> out;
  for (size_t u = 0; u < layout.sizes.size(); ++u) {
    OrderedSum sum;
    for (int k = 0; k < layout.owners; ++k) {
      int64_t& at = begins[static_cast<size_t>(k)];
      for (const int64_t end = at + blocks(u, k); at < end; ++at) sum.add(here.data<double>()[at]);
    }
    out.push_back(sum.total());
  }
  return Tensor::of<double>(out, {std::ssize(out)}, s.arena()->host());
}

void sum_over_axes(const DataStrategy& s, std::vector<double>& sums) {
  const auto sum_squares = [&](bool of_experts, Communicator& axis) {
    std::vector<double> own(sums.size(), 0.0);
    for (size_t u = 0; u < sums.size(); ++u)
      if (s.shards()[u].slots[0].parameter->is_expert == of_experts) own[u] = sums[u];
    axis.sum(own);
    for (size_t u = 0; u < sums.size(); ++u)
      if (s.shards()[u].slots[0].parameter->is_expert == of_experts) sums[u] = own[u];
  };
  if (!s.experts_axis()) return s.shard_axis().sum(sums);
  sum_squares(false, s.shard_axis());
  sum_squares(true, *s.experts_axis());
}

}  // namespace

Tensor unit_squares(const DataStrategy& s, const Communicator* parameter_axis) {
  if (parameter_axis && parameter_axis->size() > 1) return squares_of_own(s, parameter_axis);
  const ShardingKind sharding = s.layout().sharding;
  if (sharding == ShardingKind::in_shards) return squares_along_axes(s);
  return sharding == ShardingKind::by_owners ? squares_of_owners(s) : squares_of_own(s, nullptr);
}

ExactSum exact_squares(const DataStrategy& s, const Communicator& parameter_axis,
                       const std::function<bool(size_t unit)>& counted) {
  ExactSum sum{};
  for (size_t u = 0; s.copy() == 0 && u < s.shards().size(); ++u) {
    const FlatUnit& shard = s.shards()[u];
    if (!shard.trainable() || !counted(u)) continue;
    for (const Slot& slot : shard.slots) {
      const int64_t from = std::max(slot.begin, int64_t{0}), to = std::min(slot.end(), shard.grads.numel());
      const bool counts = parameter_axis.rank() == 0 || slot.parameter->shard.axis == parameter_axis.axis();
      if (from < to && counts) add_squares(sum, shard.grads.narrow(0, from, to - from));
    }
  }
  return sum;
}

std::vector<double> unit_sums(const DataStrategy& s, Communicator* parameter_axis) {
  std::vector<double> sums = unit_squares(s, parameter_axis).to_vector<double>();
  const ShardingKind sharding = s.layout().sharding;
  const bool sharded = parameter_axis && parameter_axis->size() > 1;
  if (sharding == ShardingKind::at_root || (sharded && sharding != ShardingKind::everywhere)) sum_over_axes(s, sums);
  if (sharded) parameter_axis->sum(sums);
  return sums;
}

}  // namespace tessera
