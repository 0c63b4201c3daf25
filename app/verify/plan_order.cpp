// Pipeline ranks tell the first of them how they cut their gradients.
#include "app/verify/plan_order.h"

#include "app/plan.h"

namespace tessera {
namespace {

// ZeRO's reduce-scatter has no tree.
Algorithm algorithm_of(const TrainOptions& o) {
  const Algorithm algorithm = algorithm_named(o.all_reduce);
  return algorithm == Algorithm::tree && o.zero > 0 ? Algorithm::direct : algorithm;
}

std::vector<int64_t> cuts_of(const DataStrategy& strategy) {
  std::vector<int64_t> out;
  for (const Reduced& r : strategy.reductions()) out.insert(out.end(), {r.range.begin, r.range.end, r.count});
  return out;
}

}  // namespace

// A unit's name tells its stage, and so do the elements of all units how long a rank's row is. Where sums are split
// inside products anyway, the order of ranks does not matter.
SumOrder order_of_sums(Trainer& t, const TrainOptions& o) {
  Communicator& pp = t.mesh()["pp"];
  if (splits_sums(o)) {
    SumOrder order{.ranks = t.mesh().size("dp")};
    int64_t size = 0;
    for (const Module::Unit& unit : t.whole_model().layout()) {
      order.units.push_back(unit.name);
      size += unit.size;
    }
    order.reductions = {{{0, size}, size}};
    return order;
  }
  SumOrder order{.ranks = t.mesh().size("dp"),
                 .algorithm = algorithm_of(o),
                 .every_microbatch = t.strategy().reduces_every_microbatch()};
  const std::vector<int64_t> own = cuts_of(t.strategy());
  const Tensor count = Tensor::of<int64_t>(std::vector<int64_t>{static_cast<int64_t>(own.size())}, {1}, t.arena());
  if (pp.rank() != 0) {
    pp.send(count, 0);
    pp.send(Tensor::of<int64_t>(own, {static_cast<int64_t>(own.size())}, t.arena()), 0);
    return order;
  }
  const bool apart = !t.model().config.tied;
  int64_t begin = 0;
  for (int p = 0; p < pp.size(); ++p) {
    std::vector<int64_t> cuts = own;
    if (p > 0) {
      pp.recv(count, p);
      const Tensor theirs = Tensor::empty({count.item<int64_t>()}, DType::int64, t.arena());
      pp.recv(theirs, p);
      cuts = theirs.to_vector<int64_t>();
    }
    for (size_t i = 0; i < cuts.size(); i += 3)
      order.reductions.push_back({{begin + cuts[i], begin + cuts[i + 1]}, cuts[i + 2]});
    int64_t table = 0;
    for (const Module::Unit& unit : t.whole_model().layout()) {
      if (unit.name == "tokens") table = unit.size;
      if (t.pipeline_rank_of(unit.name) != p) continue;
      order.units.push_back(unit.name);
      begin += unit.size;
    }
    if (!apart || t.pipeline_rank_of("head") != p) continue;
    order.units.emplace_back("head");
    begin += table;
  }
  return order;
}

}  // namespace tessera
