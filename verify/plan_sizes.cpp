// Sizes from sizes.
#include "verify/plan_sizes.h"

#include "models/gpt_stages.h"
#include "parallel/comm/call.h"
#include "train/plan.h"

namespace tessera {
namespace {

PartSizes part_of(const GptConfig& g, const PlanSizes& s, int pp, int tp) {
  const int64_t c = g.channels, t = s.plan.tp;
  const int64_t entries = piece(g.vocab, static_cast<int>(t), tp).size();
  const std::vector<Range> layers = split_layers(g, s.schedule.stages);
  const int stages = s.schedule.stages;
  PartSizes part;
  const auto here = [&](int stage) { return s.schedule.rank_of_stage[static_cast<size_t>(stage)] == pp; };
  part.first = here(0);
  part.last = here(stages - 1);
  if (part.first) {
    // A table that is the head too is looked up, and is needed for a product forward and one backward.
    part.units.push_back({{entries * c}, stages == 1 ? 3 : 1, true});
    part.units.push_back({{g.context * c}, 1, false});
  }
  for (int stage = 0; stage < stages; ++stage)
    if (here(stage)) part.layers += layers[static_cast<size_t>(stage)].size();
  for (int64_t i = 0; i < part.layers; ++i)  // norm, qkv, projection, norm, up, down: weights and biases
    part.units.push_back(
        {{c, c, 3 * c * c / t, 3 * c / t, c * c / t, c, c, c, 4 * c * c / t, 4 * c / t, 4 * c * c / t, c}, 2, false});
  if (part.last) {
    part.units.push_back({{c, c}, 2, false});
    if (stages > 1) part.units.push_back({{entries * c}, 2, true});
  }
  return part;
}

}  // namespace

int64_t UnitSizes::size() const {
  int64_t sum = 0;
  for (const int64_t p : parameters) sum += round_up(p, kSlot);
  return sum;
}

int64_t PartSizes::whole() const {
  int64_t sum = 0;
  for (const UnitSizes& u : units) sum += u.size();
  return sum;
}

int64_t PartSizes::padded(int64_t ranks) const {
  int64_t sum = 0;
  for (const UnitSizes& u : units) sum += u.padded(ranks);
  return sum;
}

PlanSizes::PlanSizes(const Job& job, const GptConfig& config)
    : plan(job.plan), schedule(schedule_of(plan)), data(plan.dp * plan.cp), m(plan.microbatches) {
  const DataOptions d = data_options(job);
  const Optimisation& o = job.optim;
  value = size_of(d.dtype);
  grad = size_of(d.grad_dtype);
  wide = d.dtype == DType::float64 ? 8 : 4;
  state = wide * (o.optimizer == OptimizerKind::sgd ? (o.momentum > 0 ? 1 : 0) : 2);
  if (d.dtype == DType::bfloat16) state += wide;  // the master copy
  bucket_bytes = d.bucket_bytes;
  sequences = o.batch / (plan.dp * m);
  tokens = config.context / plan.cp;
  tied_over_ranks = schedule.rank_of_stage.front() != schedule.rank_of_stage.back();
  for (int p = 0; p < plan.pp; ++p) {
    parts.emplace_back();
    for (int t = 0; t < plan.tp; ++t) parts.back().push_back(part_of(config, *this, p, t));
  }
}

}  // namespace tessera
