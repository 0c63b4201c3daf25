// Launching a run beside its oracle, and the bounds of the whole of it.
#include "app/verify/verify.h"

#include "app/plan.h"
#include "app/sequences.h"
#include "app/trainer.h"
#include "app/verify/tolerance.h"
#include "app/verify/totals.h"
#include "app/verify/verified_rank.h"
#include "parallel/comm/launch.h"
#include "parallel/pipeline/simulate.h"
#include "tensor/error.h"

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

void check_can_be_verified(const TrainOptions& o) {
  check_plan(o);
  if (o.dp_mode == "ps-async")
    throw Error(
        "--dp-mode: an asynchronous run is not the run of one rank; train --record and --replay repeat it to the bit");
  if (o.all_reduce == "native")
    throw Error("--all-reduce: the order of a library's own sums is not known; expected direct, ring, tree or root");
}

}  // namespace

VerifyResult verify(const TrainOptions& given, Mutation mutation) {
  TrainOptions o = given;
  if (!o.vocab) o.vocab = kVocab;
  check_can_be_verified(o);
  const Sequences sequences = counted_sequences(*o.vocab, sizes_of(o).context, o.batch, static_cast<uint64_t>(o.seed));
  const GptConfig config = gpt_config(o, *o.vocab);
  VerifyResult result;
  result.steps = o.steps;
  result.exact = !splits_sums(o);
  result.expected_sent = expected_bytes(o, config, o.steps);
  result.expected_held = expected_memory(o, config);
  expect_pipeline(result, schedule_of(o));
  LaunchOptions l = launch_options(o);
  if (mutation == Mutation::other_order) l.algorithm = Algorithm::ring;
  if (mutation == Mutation::drop_reduction)
    for (int r = 0; r < l.ranks; ++r) l.faults[r] = {{.kind = Fault::Kind::drop, .call = 0, .seconds = 0}};
  if (!result.exact) {
    const Tolerance tolerance = tolerance_of(o, sequences);
    result.bound = tolerance.bound;
    result.bound_text = tolerance.text;
  }
  launch(l, [&](Communicator& world) {
    VerifiedRank(o, world, sequences, mutation, result).run();
    if (backend_of(o) == Backend::mpi) result.known = world.rank() == 0;
  });
  if (result.known) check_totals(result, o);
  return result;
}

}  // namespace tessera
