// Defects that change no number: memory and schedules.
#include <memory>

#include "train/plan.h"
#include "verify/defects/groups.h"

namespace tessera {

std::vector<Defect> defects_of_resources() {
  return {
      {"kept-gradients", "a rank keeps a second buffer as large as its gradients", Cause::kept_memory,
       [](const Job& j) { return Needs(j); }, on_last_rank,
       [](VerifyHooks& h, const Job& j) {
         const auto kept = std::make_shared<std::vector<Tensor>>();
         h.made = [before = std::move(h.made), kept, rank = last_rank(j)](Trainer& t) {
           before(t);
           if (t.world().rank() != rank) return;
           for (const FlatUnit& unit : t.strategy().shards())
             if (unit.trainable())
               kept->push_back(
                   Tensor::empty({unit.values.numel()}, t.gradient_dtype(), t.arena(), Category::gradients));
         };
       }},
      {"gpipe-for-1f1b", "all forward passes come before the first backward pass", Cause::schedule,
       [](const Job& j) {
         return Needs(j)
             .ranks("pp", &Plan::pp, 2)
             .need(j.plan.schedule == ScheduleKind::one_f_one_b && j.plan.schedule_file.empty(), "schedule", "1f1b")
             .need(j.plan.microbatches > 1, "microbatches", "2");
       },
       everywhere,
       [](VerifyHooks& h, const Job&) {
         h.running = [](Job job) {
           job.plan.schedule = ScheduleKind::gpipe;
           return job;
         };
       }},
  };
}

}  // namespace tessera
