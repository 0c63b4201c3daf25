// Launching a run beside its oracle, and the bounds of the whole of it.
#include "verify/verify.h"

#include "parallel/comm/launch.h"
#include "parallel/pipeline/simulate.h"
#include "tensor/field_error.h"
#include "train/sequences.h"
#include "train/trainer.h"
#include "verify/tolerance.h"
#include "verify/verified_rank.h"

namespace tessera {
namespace {

constexpr int64_t kVocab = 64;  // unless the options say otherwise

void expect_pipeline(VerifyResult& r, const Schedule& schedule) {
  const Simulation clock = simulate(schedule);
  r.expected_in_flight.assign(clock.in_flight.begin(), clock.in_flight.end());
  if (schedule.ranks == 1) return;
  r.bubble = clock.bubble_share();
  r.bubble_formula = bubble_formula(schedule);
}

void check_can_be_verified(const Job& s) {
  check(s);
  if (s.plan.dp_mode == DataMode::ps_async)
    throw FieldError(
        "dp_mode", "an asynchronous run is not the run of one rank; train `record` and `replay` repeat it to the bit");
  if (s.plan.all_reduce == Algorithm::native)
    throw FieldError("all_reduce",
                     "the order of a library's own sums is not known; expected direct, ring, tree or root");
}

}  // namespace

Job verifiable(Job job) {
  if (job.model.vocab == 0) job.model.vocab = kVocab;
  job.plan.deterministic = true;
  job.model.lora.starts_idle = false;  // else A has no gradient in the first step
  if (job.plan.attention == AttentionKernels::automatic) job.plan.attention = AttentionKernels::own;
  return job;
}

VerifyResult verify(const Job& given, const VerifyHooks& hooks) {
  const Job s = verifiable(given);
  check_can_be_verified(s);
  const Optimisation& o = s.optim;
  const Sequences sequences = hooks.sequences(s);
  VerifyResult result;
  result.steps = o.steps;
  result.exact = !splits_sums(s.plan);
  result.expected_sent = expected_bytes(s, o.steps);
  result.expected_held = expected_memory(s);
  expect_pipeline(result, schedule_of(s.plan));
  LaunchOptions l = launch_options(s.plan);
  hooks.launching(l);
  if (!result.exact) {
    const Tolerance tolerance = tolerance_of(s, sequences);
    result.bound = tolerance.bound;
    result.bound_text = tolerance.text;
  }
  launch(l, [&](Communicator& world) {
    VerifiedRank(s, world, sequences, hooks, result).run();
    if (has_processes(s.plan)) result.known = world.rank() == 0;
  });
  if (result.known) check_totals(result, s.plan);
  return result;
}

}  // namespace tessera
