// Defects of what ranks compute: other sequences, or targets, than the plan's.
#include <algorithm>

#include "train/plan.h"
#include "verify/defects/groups.h"

namespace tessera {
namespace {

int64_t micro_size(const Job& job) { return job.optim.batch / (job.plan.dp * job.plan.microbatches); }

bool has_last_stage(const Job& job, int rank) { return rank / (job.plan.ranks() / job.plan.pp) == job.plan.pp - 1; }

// Each sequence is taken from another place; -1: its targets are none.
using Place = std::function<int64_t(int64_t sequence)>;
Sequences moved(Sequences sequences, int64_t context, const Place& place) {
  sequences.load = [=, load = sequences.load](int64_t step, int64_t first, int64_t count, int32_t* inputs,
                                              int32_t* targets) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t from = place(first + i);
      load(step, from < 0 ? first + i : from, 1, inputs + i * context, targets + i * context);
      if (from < 0) std::fill_n(targets + i * context, context, -1);
    }
  };
  return sequences;
}

void load_from(VerifyHooks& hooks, const Job& planted_in, const Place& place, bool only_targets = false) {
  hooks.loading = [=, context = planted_in.model.context](Sequences sequences, const Job& job, int rank) {
    if (only_targets && !has_last_stage(job, rank)) return sequences;
    return moved(std::move(sequences), context, place);
  };
}

}  // namespace

std::vector<Defect> defects_of_data() {
  const auto several = [](const Job& j) {
    return Needs(j).need(j.plan.microbatches * j.plan.dp > 1, "microbatches", "2");
  };
  return {
      {"skipped-microbatch", "the last micro-batch of the last data rank teaches nothing", Cause::microbatch_skipped,
       [=](const Job& j) { return several(j); },
       [](const Job& j) { return "on data rank " + std::to_string(j.plan.dp - 1); },
       [](VerifyHooks& h, const Job& j) {
         load_from(h, j, [last = j.optim.batch - micro_size(j)](int64_t s) { return s >= last ? -1 : s; });
       }},
      {"repeated-microbatch",
       "the last data rank computes its second-to-last micro-batch twice, and its last one never",
       Cause::microbatch_repeated,
       [](const Job& j) { return Needs(j).need(j.plan.microbatches > 1, "microbatches", "2"); },
       [](const Job& j) { return "on data rank " + std::to_string(j.plan.dp - 1); },
       [](VerifyHooks& h, const Job& j) {
         load_from(h, j, [size = micro_size(j), last = j.optim.batch - micro_size(j)](int64_t s) {
           return s >= last ? s - size : s;
         });
       }},
      {"shifted-sequences", "all micro-batches but the first begin one sequence too early", Cause::wrong_sequences,
       [=](const Job& j) { return several(j).batch_of(2); }, everywhere,
       [](VerifyHooks& h, const Job& j) {
         load_from(h, j, [size = micro_size(j)](int64_t s) { return s < size ? s : s - 1; });
       }},
      {"other-targets", "the last stage compares with the targets of the next micro-batch", Cause::wrong_targets,
       [=](const Job& j) {
         return several(j).ranks("pp", &Plan::pp, 2).need(!is_v(j.plan.schedule), "schedule", "1f1b");
       },
       [](const Job& j) { return "on pipeline rank " + std::to_string(j.plan.pp - 1); },
       [](VerifyHooks& h, const Job& j) {
         load_from(
             h, j, [size = micro_size(j), batch = j.optim.batch](int64_t s) { return (s + size) % batch; }, true);
       }},
  };
}

}  // namespace tessera
