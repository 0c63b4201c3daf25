// Launches a run with its oracle, and checks totals.
#include "verify/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "parallel/comm/launch.h"
#include "parallel/pipeline/simulate.h"
#include "verify/comparison.h"
#include "verify/tolerance.h"
#include "verify/verified_rank.h"

namespace tessera {

namespace {

constexpr double kPeakSlack = 1.02;     // relative margin for the peak
constexpr double kPeakBytes = 1 << 14;  // margin for small arrays, which matter in models of a few kilobytes
constexpr double kSameBubble = 1e-9;
constexpr size_t kToFall = 40;  // steps after which the loss must have decreased

void check_sent(VerifyResult& r) {
  for (const SentBytes& e : r.expected_sent) {
    const SentBytes* const found = find_sent(r.sent, e);
    if (found && found->calls == e.calls && found->bytes == e.bytes) continue;
    const SentBytes f = found ? *found : SentBytes{};
    r.seen.sent.push_back({e.axis, e.operation, f.calls, e.calls, f.bytes, e.bytes});
    r.failures.push_back(fmt::format("{} axis, {}: {} calls and {} bytes; expected {} and {}", e.axis, e.operation,
                                     f.calls, f.bytes, e.calls, e.bytes));
  }
  for (const SentBytes& s : r.sent) {
    if (find_sent(r.expected_sent, s)) continue;
    r.seen.sent.push_back({s.axis, s.operation, s.calls, 0, s.bytes, 0});
    r.failures.push_back(
        fmt::format("{} axis, {}: {} calls and {} bytes; expected none", s.axis, s.operation, s.calls, s.bytes));
  }
}

void check_held(VerifyResult& r) {
  for (size_t rank = 0; rank < r.held.size(); ++rank) {
    const MemoryByCategory &f = r.held[rank], &e = r.expected_held[rank];
    const auto one = [&](std::string_view what, int64_t found, int64_t expected) {
      if (found == expected) return;
      r.seen.held.push_back({static_cast<int>(rank), std::string(what), found, expected});
      r.failures.push_back(fmt::format("rank {} holds {} bytes of {}; expected {}", rank, found, what, expected));
    };
    one("parameters", f.parameters, e.parameters);
    one("gradients", f.gradients, e.gradients);
    one("optimizer state", f.optimizer, e.optimizer);
    if (r.peak[rank] <= peak_bound(r.expected_peak[rank])) continue;
    r.seen.held.push_back({static_cast<int>(rank), "peak", r.peak[rank], peak_bound(r.expected_peak[rank])});
    r.failures.push_back(fmt::format("rank {}: peak memory is {} bytes; expected at most {}", rank, r.peak[rank],
                                     peak_bound(r.expected_peak[rank])));
  }
}

void check_pipeline(VerifyResult& r) {
  if (r.in_flight != r.expected_in_flight && !r.in_flight.empty()) {
    r.seen.in_flight = r.in_flight;
    r.seen.expected_in_flight = r.expected_in_flight;
  }
  for (size_t p = 0; p < r.in_flight.size(); ++p)
    if (r.in_flight[p] != r.expected_in_flight[p])
      r.failures.push_back(fmt::format("pipeline rank {} had {} micro-batches of a stage in flight; expected {}", p,
                                       r.in_flight[p], r.expected_in_flight[p]));
  if (r.bubble && r.bubble_formula && std::abs(*r.bubble - *r.bubble_formula) > kSameBubble)
    r.failures.push_back(
        fmt::format("the simulated pipeline bubble is {} of the step time; expected {}", *r.bubble, *r.bubble_formula));
}

void check_losses(VerifyResult& r) {
  for (const double loss : r.losses)
    if (!std::isfinite(loss)) r.failures.emplace_back("a loss is not finite");
  if (r.losses.size() < kToFall) return;
  const auto quarter = static_cast<std::ptrdiff_t>(r.losses.size() / 4);
  const double first = std::accumulate(r.losses.begin(), r.losses.begin() + quarter, 0.0),
               last = std::accumulate(r.losses.end() - quarter, r.losses.end(), 0.0);
  if (!(last < first))
    r.failures.push_back(fmt::format("the loss does not decrease: {} at the beginning, {} at the end", r.losses.front(),
                                     r.losses.back()));
}

// Rounding may change the choice between experts whose logits differ by at most the bound.
void check_routing(VerifyResult& r) {
  if (r.routing_margin <= r.bound) return;
  r.failures.push_back(
      fmt::format("{} tokens were routed to a different expert than on one rank, whose logit is lower by up to {:.3g} "
                  "of the largest; expected at most {:.3g}",
                  r.rerouted_tokens, r.routing_margin, r.bound));
}

}  // namespace

const SentBytes* find_sent(const std::vector<SentBytes>& all, const SentBytes& wanted) {
  const auto found = std::ranges::find_if(
      all, [&](const SentBytes& s) { return s.axis == wanted.axis && s.operation == wanted.operation; });
  return found == all.end() ? nullptr : &*found;
}

int64_t peak_bound(int64_t expected) {
  return static_cast<int64_t>(kPeakSlack * static_cast<double>(expected) + kPeakBytes);
}

void check_totals(VerifyResult& r, const Plan& plan) {
  check_sent(r);
  check_held(r);
  check_pipeline(r);
  check_losses(r);
  check_routing(r);
  if (plan.ranks() > 1 && r.sent.empty()) r.failures.emplace_back("no rank has communicated");
}

namespace {

constexpr int64_t kVocab = 64;  // default

void expect_pipeline(VerifyResult& r, const Schedule& schedule) {
  const Simulation clock = simulate(schedule);
  r.expected_in_flight.assign(clock.in_flight.begin(), clock.in_flight.end());
  if (schedule.ranks == 1) return;
  r.bubble = clock.bubble_fraction();
  r.bubble_formula = bubble_formula(schedule);
}

void check_can_be_verified(const TrainConfig& s) {
  check(s);
  if (s.plan.dp_mode == DataMode::ps_async)
    throw FieldError("dp_mode",
                     "an asynchronous run has no equivalent one-rank run; use `record` and `replay` with train for "
                     "bitwise reproduction");
  if (s.plan.all_reduce == Algorithm::native)
    throw FieldError("all_reduce",
                     "the summation order of a native all-reduce is unknown; expected " + expected_algorithms());
}

void describe_run(Observations& o, const TrainConfig& job, bool exact) {
  const Plan& p = job.plan;
  o.pp = p.pp;
  o.dp = p.dp;
  o.cp = p.cp;
  o.tp = p.tp;
  o.groups = p.zero == ZeroStage::none ? 1 : p.dp * p.cp / shard_group_size(p);
  o.batch = job.optim.batch;
  o.microbatches = p.microbatches;
  o.experts = job.model.experts.count;
  const DType sums = data_options(job).grad_dtype;
  if (exact) o.rounding = sums == DType::float64 ? 1e-11 : sums == DType::float32 ? 1e-5 : 0.03;
}

// With `failure_is_seen`, a rank's failure becomes an observation.
void run(const LaunchOptions& how, VerifyResult& result, const VerifyHooks& hooks,
         const std::function<void(Communicator&)>& body) {
  try {
    launch(how, body);
  } catch (const Error& e) {
    const bool of_a_rank = e.status() == Status::communication || e.status() == Status::not_finite;
    if (!hooks.failure_is_seen || !of_a_rank) throw;
    result.seen.stopped = e.what();
    static const std::regex pattern(" within |at the same time; all ranks|recv of .* sent ");
    result.seen.out_of_step = std::regex_search(result.seen.stopped, pattern);
    result.failures.push_back("the run failed: " + result.seen.stopped);
  }
}

}  // namespace

TrainConfig verifiable(TrainConfig job) {
  if (job.model.vocab == 0) job.model.vocab = kVocab;
  job.plan.deterministic = true;
  job.model.lora.starts_idle = false;  // otherwise LoRA's A has no gradient in the first step
  if (job.plan.attention == AttentionKernels::automatic) job.plan.attention = AttentionKernels::own;
  return job;
}

VerifyResult verify(const TrainConfig& given, const VerifyHooks& hooks) {
  const TrainConfig s = verifiable(given);
  check_can_be_verified(s);
  const Optimisation& o = s.optim;
  const Sequences sequences = hooks.sequences(s);
  VerifyResult result;
  result.steps = o.steps;
  result.exact = !splits_sums(s.plan);
  result.expected_sent = expected_bytes(s, o.steps);
  result.expected_held = expected_memory(s);
  expect_pipeline(result, make_schedule(s.plan));
  LaunchOptions l = launch_options(s.plan);
  hooks.launching(l);
  if (!result.exact) {
    const Tolerance tolerance = compute_tolerance(s, sequences, hooks.working);
    result.bound = tolerance.bound;
    result.bound_text = tolerance.text;
  }
  describe_run(result.seen, s, result.exact);
  run(l, result, hooks, [&](Communicator& world) {
    run_with_oracle(s, world, sequences, hooks, result);
    if (has_processes(s.plan)) result.known = world.rank() == 0;
  });
  if (!result.known) return result;
  for (std::string& line : to_lines(result)) result.failures.push_back(std::move(line));
  if (!result.seen.stopped.empty()) return result;  // counts and memory are unknown
  for (const GivenDifference& g : result.seen.given)
    result.failures.push_back(fmt::format(
        "rank {} received tokens that differ from the oracle's in {} sequences, first in sequence {} of step {}",
        g.rank, g.sequences, g.sequence, g.step));
  for (const std::string& line : result.seen.copies) result.failures.push_back(line);
  check_totals(result, s.plan);
  return result;
}

}  // namespace tessera
