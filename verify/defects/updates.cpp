// Defects of updates, and of what ranks tell each other after them.
#include "optim/grad_norm.h"
#include "train/plan.h"
#include "verify/defects/groups.h"

namespace tessera {
namespace {

void instead_of_update(VerifyHooks& hooks, const std::function<void(Trainer&, const StepReport&)>& update) {
  hooks.update = update;
}

bool is_last(Trainer& t) { return t.world().rank() == t.world().size() - 1; }

// The first quarter of each unit stays as it was.
void update_but_a_quarter(Trainer& t, const StepReport& report) {
  std::vector<Tensor> old;
  for (const FlatUnit& unit : t.strategy().residents()) old.push_back(unit.values.clone());
  t.update(report);
  size_t at = 0;
  for (const Tensor& values : old) {
    const Tensor now = t.strategy().residents()[at++].values;
    const int64_t quarter = values.numel() / 4;
    now.narrow(0, 0, quarter).copy_from(values.narrow(0, 0, quarter));
  }
}

// Every shard one place further.
void misplace(Trainer& t) {
  const int ranks = t.strategy().shard_axis().size();
  for (const FlatUnit& unit : t.strategy().residents()) {
    if (!unit.trainable() && unit.values.numel() % ranks != 0) continue;
    const Tensor right = unit.values.clone();
    const int64_t size = right.numel() / ranks;
    for (int64_t r = 0; r < ranks; ++r)
      unit.values.narrow(0, (r + 1) % ranks * size, size).copy_from(right.narrow(0, r * size, size));
  }
}

std::vector<Need> needs_shards(const Job& j) {
  const bool gathers = j.plan.zero == ZeroStage::one || j.plan.zero == ZeroStage::two;
  return Needs(j).data_ranks().ddp().need(gathers, "zero", "1").need(j.plan.shard_ranks != 1, "shard_ranks", "2");
}

}  // namespace

std::vector<Defect> defects_of_updates() {
  return {
      {"missing-gather",
       "updated shards are not gathered: each rank goes on with old values of the other ranks' shards",
       Cause::missing_gather, needs_shards, everywhere,
       [](VerifyHooks& h, const Job&) {
         instead_of_update(h, [](Trainer& t, const StepReport& r) {
           t.optimizer().step(r.lr, clip_factor(r.grad_norm, t.job().optim.clip));
         });
       }},
      {"misplaced-gather", "each gathered shard is put in the place of the next rank's shard", Cause::misplaced_gather,
       needs_shards, everywhere,
       [](VerifyHooks& h, const Job&) {
         instead_of_update(h, [](Trainer& t, const StepReport& r) {
           t.update(r);
           misplace(t);
         });
       }},
      {"stale-part", "after each update a rank goes on with old values in a quarter of each unit", Cause::stale_part,
       [](const Job& j) { return Needs(j).need(j.plan.dp_mode == DataMode::ddp, "dp_mode", "ddp"); }, on_last_rank,
       [](VerifyHooks& h, const Job&) {
         instead_of_update(h, [](Trainer& t, const StepReport& r) {
           if (is_last(t))
             update_but_a_quarter(t, r);
           else
             t.update(r);
         });
       }},
      {"skipped-update", "the optimizer counts its steps and updates nothing", Cause::update_skipped,
       [](const Job& j) { return Needs(j); }, everywhere,
       [](VerifyHooks& h, const Job&) {
         instead_of_update(h, [](Trainer& t, const StepReport&) {
           t.optimizer().count_step();
           t.strategy().share_parameters();
         });
       }},
      {"unclipped-rank", "one rank does not clip its gradients", Cause::clipping,
       [](const Job& j) { return Needs(j).ddp().need(j.optim.clip > 0 && j.optim.clip <= 0.5, "clip", "0.1"); },
       on_last_rank,
       [](VerifyHooks& h, const Job&) {
         instead_of_update(h, [](Trainer& t, StepReport r) {
           if (is_last(t)) r.grad_norm = 0;
           t.update(r);
         });
       }},
  };
}

}  // namespace tessera
