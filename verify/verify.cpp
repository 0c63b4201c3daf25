// Launching a run beside its oracle, and the bounds of the whole of it.
#include "verify/verify.h"

#include <fmt/format.h>

#include <regex>

#include "parallel/comm/launch.h"
#include "parallel/pipeline/simulate.h"
#include "tensor/error.h"
#include "train/sequences.h"
#include "train/trainer.h"
#include "verify/comparison.h"
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

void describe_run(Observations& o, const Job& job, bool exact) {
  const Plan& p = job.plan;
  o.pp = p.pp;
  o.dp = p.dp;
  o.cp = p.cp;
  o.tp = p.tp;
  o.groups = p.zero == ZeroStage::none ? 1 : p.dp * p.cp / shared_over(p);
  o.batch = job.optim.batch;
  o.microbatches = p.microbatches;
  o.experts = job.model.experts.count;
  const DType sums = data_options(job).grad_dtype;
  if (exact) o.rounding = sums == DType::float64 ? 1e-11 : sums == DType::float32 ? 1e-5 : 0.03;
}

// launch(), whose failure may be one of the things that are seen.
void run(const LaunchOptions& how, VerifyResult& result, const VerifyHooks& hooks,
         const std::function<void(Communicator&)>& body) {
  try {
    launch(how, body);
  } catch (const Error& e) {
    const bool of_a_rank = e.status() == Status::communication || e.status() == Status::not_finite;
    if (!hooks.failure_is_seen || !of_a_rank) throw;
    result.seen.stopped = e.what();
    static const std::regex words(" within |asks for|recv of .* sent ");
    result.seen.out_of_step = std::regex_search(result.seen.stopped, words);
    result.failures.push_back("the run ended: " + result.seen.stopped);
  }
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
  describe_run(result.seen, s, result.exact);
  run(l, result, hooks, [&](Communicator& world) {
    VerifiedRank(s, world, sequences, hooks, result).run();
    if (has_processes(s.plan)) result.known = world.rank() == 0;
  });
  if (!result.known) return result;
  for (std::string& line : lines_of(result)) result.failures.push_back(std::move(line));
  if (!result.seen.stopped.empty()) return result;  // what was counted and held is not known
  for (const GivenDifference& g : result.seen.given)
    result.failures.push_back(
        fmt::format("rank {} was given other tokens than the oracle for {} sequences, first for "
                    "sequence {} of step {}",
                    g.rank, g.sequences, g.sequence, g.step));
  for (const std::string& line : result.seen.copies) result.failures.push_back(line);
  check_totals(result, s.plan);
  return result;
}

}  // namespace tessera
