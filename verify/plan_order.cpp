// Pipeline ranks tell the first of them how they cut their gradients.
#include "verify/plan_order.h"

namespace tessera {
namespace {

// ZeRO's reduce-scatter has no tree.
Algorithm algorithm_of(const Plan& p) {
  return p.all_reduce == Algorithm::tree && p.zero != ZeroStage::none ? Algorithm::direct : p.all_reduce;
}

std::vector<int64_t> cuts_of(const DataStrategy& strategy) {
  std::vector<int64_t> out;
  const DataLayout& l = strategy.layout();
  for (const Reduced& r : l.reductions) out.insert(out.end(), {r.range.begin, r.range.end, r.count, 0});
  for (const Reduced& r : l.between) out.insert(out.end(), {r.range.begin, r.range.end, r.count, 1});
  return out;
}

// The pipeline rank that has a copy of a tied unit's weight, for its use at the end; -1: none has.
int copied_to(Trainer& t, const Module::Unit& unit) {
  return !t.model().config.tie_copies || !unit.slots[0].parameter->is_tied() ? -1 : t.schedule().rank_of_stage.back();
}

}  // namespace

// A unit tells its stage, and so do the elements of all units how long a rank's row is. Where sums are split
// inside products anyway, the order of ranks does not matter.
SumOrder order_of_sums(Trainer& t) {
  const Plan& p = t.job().plan;
  Communicator& pp = t.mesh()["pp"];
  const std::vector<Module::Unit> whole = t.whole_model().layout();
  if (splits_sums(p)) {
    SumOrder order{.ranks = t.mesh().size("dp"), .algorithm = algorithm_of(p)};
    int64_t size = 0;
    for (size_t u = 0; u < whole.size(); ++u) {
      if (!whole[u].trainable) continue;
      order.parts.push_back({u});
      size += whole[u].size;
    }
    order.reductions = {{{0, size}, size}};
    return order;
  }
  SumOrder order{.ranks = t.mesh().size("dp"),
                 .ep = static_cast<int>(p.ep),
                 .algorithm = algorithm_of(p),
                 .every_microbatch = t.strategy().layout().every_microbatch,
                 .group = t.strategy().shard_axis().size(),
                 .between_algorithm = p.all_reduce};
  const std::vector<int64_t> own = cuts_of(t.strategy());
  const Tensor count = Tensor::of<int64_t>(std::vector<int64_t>{std::ssize(own)}, {1}, t.arena());
  if (pp.rank() != 0) {
    pp.send(count, 0);
    pp.send(Tensor::of<int64_t>(own, {std::ssize(own)}, t.arena()), 0);
    return order;
  }
  int64_t begin = 0;
  for (int rank = 0; rank < pp.size(); ++rank) {
    std::vector<int64_t> cuts = own;
    if (rank > 0) {
      pp.recv(count, rank);
      const Tensor theirs = Tensor::empty({count.item<int64_t>()}, DType::int64, t.arena());
      pp.recv(theirs, rank);
      cuts = theirs.to_vector<int64_t>();
    }
    for (size_t i = 0; i < cuts.size(); i += 4)
      (cuts[i + 3] == 0 ? order.reductions : order.between)
          .push_back({{begin + cuts[i], begin + cuts[i + 1]}, cuts[i + 2]});
    const auto add = [&](size_t unit, bool copy) {
      order.parts.push_back({unit, copy});
      begin += whole[unit].size;
    };
    for (size_t u = 0; u < whole.size(); ++u)
      if (whole[u].trainable && t.pipeline_rank_of(u) == rank) add(u, false);
    for (size_t u = 0; u < whole.size(); ++u)
      if (whole[u].trainable && copied_to(t, whole[u]) == rank) add(u, true);
  }
  // Ranks have different experts, and cuts of their own; but no algorithm that goes with `ep` adds by cuts.
  if (p.ep > 1) order.between = {{{0, begin}, begin}};
  return order;
}

}  // namespace tessera
