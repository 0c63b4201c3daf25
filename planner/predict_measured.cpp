// The parts of a step, added up.
#include "planner/predict_measured.h"

#include <algorithm>
#include <map>

#include "planner/shared_processors.h"
#include "planner/step_work.h"
#include "tensor/error.h"

namespace tessera::planner {
namespace {

// One rank's share of what all of them do, with the company that it has.
class Clock {
 public:
  Clock(const Case& c, const Machine& machine)
      : c_(c),
        m_(machine),
        dtype_(c.software.parameter_bytes < 4 ? DType::bfloat16 : DType::float32),
        ranks_(c.layout.plan.ranks()),
        threads_(c.layout.plan.threads_per_rank > 0 ? c.layout.plan.threads_per_rank
                                                    : std::max<int64_t>(1, machine.identity.processors / ranks_)),
        schedule_(schedule_of(c.layout.plan)),
        stages_(stage_work(c, dtype_)),
        updates_(update_work(c, dtype_)) {}
  void set(Prediction& out);

 private:
  struct Costs {
    double forward = 0, input = 0, weight = 0, again = 0, tp = 0, cp = 0, dp = 0;
  };
  double of(const Work& work, double busy) const { return seconds(m_, work, dtype_, threads_, busy, ranks_); }
  double of(const std::vector<ExchangeCalls>& calls, double busy) const { return seconds(m_, calls, busy, ranks_); }
  double busy_ranks(int working) const {
    const int64_t of_each = ranks_ / c_.layout.plan.pp;
    return static_cast<double>(working * of_each);
  }
  // Of a stage beside so many ranks of the pipeline, each of which stands for those of the other axes.
  StageTimes times(size_t stage, int working) const;
  double message(size_t stage, int working) const;
  double passes(Prediction& out) const;

  const Case& c_;
  const Machine& m_;
  DType dtype_;
  int64_t ranks_, threads_;
  Schedule schedule_;
  std::vector<StageWork> stages_;
  std::vector<UpdateWork> updates_;
};

StageTimes Clock::times(size_t stage, int working) const {
  const double busy = busy_ranks(working);
  const StageWork& w = stages_[stage];
  const auto rank = static_cast<size_t>(schedule_.rank_of_stage[stage]);
  const double chunks = schedule_.chunks(), half = message(stage, working);
  // Gathers of parameters belong to both passes, sums of gradients to the weights.
  double gathers = 0, sums = 0;
  for (const ExchangeCalls& call : updates_[rank].data_of_stages)
    (call.exchange == Exchange::all_gather ? gathers : sums) += of({call}, busy) / chunks;
  StageTimes t;
  t.forward = of(w.forward, busy) + gathers / 2 + half;
  t.input = of(w.input, busy) + of(w.again, busy) + gathers / 2 + half;
  t.weight = of(w.weight, busy) + sums;
  t.backward = t.input + t.weight;
  return t;
}

// Half of what a stage sends and receives in a pass: the other half is its neighbour's.
double Clock::message(size_t stage, int working) const {
  const Plan& p = c_.layout.plan;
  const double e = dtype_ == DType::bfloat16 ? 2 : 4,
               bytes = e * static_cast<double>(c_.layout.sequences * c_.model.context * c_.model.channels) /
                       static_cast<double>(p.cp * (p.sp ? p.tp : 1)),
               busy = busy_ranks(working);
  const auto s = static_cast<int>(stage);
  const int sides =
      (s > 0 && schedule_.crosses(s - 1) ? 1 : 0) + (s + 1 < schedule_.stages && schedule_.crosses(s) ? 1 : 0);
  return sides * of({{Exchange::send, 2, bytes, 0.5}}, busy);
}

double Clock::passes(Prediction& out) const {
  std::map<std::pair<size_t, int>, StageTimes> known;
  const Simulation sim = simulate_shared(schedule_, [&](const Action& a, int working) {
    const auto stage = static_cast<size_t>(a.stage);
    const auto [at, made] = known.try_emplace({stage, working});
    if (made) at->second = times(stage, working);
    const StageTimes& t = at->second;
    return a.what == Do::F ? t.forward : a.what == Do::B ? t.backward : a.what == Do::I ? t.input : t.weight;
  });
  const auto all = static_cast<int>(c_.layout.plan.pp);
  for (size_t s = 0; s < stages_.size(); ++s) out.stages.push_back(times(s, all));
  out.message_s = 0;
  out.bubble = sim.makespan * sim.bubble_share();
  return sim.makespan;
}

// Everything but the bubble is split as it would be with all ranks at work.
void Clock::set(Prediction& out) {
  const Plan& p = c_.layout.plan;
  out.stages.clear();
  const double makespan = passes(out), busy = static_cast<double>(ranks_), m = static_cast<double>(p.microbatches);
  Parts& parts = out.parts = {};
  for (size_t s = 0; s < stages_.size(); ++s) {
    const StageWork& w = stages_[s];
    const double share = m / static_cast<double>(p.pp);
    for (const Work* pass : {&w.forward, &w.input, &w.weight}) {
      parts.compute += share * of(Work{.kernels = pass->kernels}, busy);
      parts.tp += share * of(pass->tp, busy);
      parts.cp += share * of(pass->cp, busy);
    }
    parts.recompute += share * of(Work{.kernels = w.again.kernels}, busy);
    parts.tp += share * of(w.again.tp, busy);
    parts.cp += share * of(w.again.cp, busy);
  }
  double slowest = 0;
  for (const UpdateWork& u : updates_) {
    parts.dp += m * of(u.data_of_stages, busy) / static_cast<double>(p.pp);
    const double optimizer = of(u.kernels, busy),
                 dp = of(u.data, busy) + u.messages * m_.seconds(Exchange::all_reduce, ranks_, 0);
    if (optimizer + dp <= slowest) continue;
    slowest = optimizer + dp;
    parts.optimizer = optimizer;
  }
  parts.dp += slowest - parts.optimizer;
  out.step_s = makespan + slowest;
  parts.bubble = std::max(0.0, out.step_s - (parts.sum() - parts.bubble));
  out.bubble /= out.step_s;
}

}  // namespace

Hardware hardware_of(const std::shared_ptr<const Machine>& machine, DType dtype) {
  // Of heads of 64: seconds of a query for itself, and for each of the keys that it sees, which are half of them.
  constexpr double kHead = 64;
  const Cost& attention = machine->costs[static_cast<size_t>(Company::alone)][dtype == DType::bfloat16 ? 1 : 0]
                                        [static_cast<size_t>(Kernel::attention_forward)];
  const double query = attention[1] * kHead, key = attention[2] + attention[3] * kHead;
  const auto p = static_cast<double>(machine->identity.processors);
  LinkCost link = machine->links[static_cast<size_t>(Exchange::send)].begin()->second;
  link.s_per_byte = std::max(link.s_per_byte, 1e-13);  // a fit may find that bytes are free
  return {.name = "this",
          .peak_flops = machine->product_flops_per_s[dtype == DType::bfloat16 ? 1 : 0] / p,
          .hbm_bytes_per_s = machine->copy_bytes_per_s / p,
          .memory_bytes = machine->memory_bytes,
          .multiprocessors = 1,
          .ranks_per_node = 1024,
          .intra_bytes_per_s = 1 / link.s_per_byte,
          .inter_bytes_per_s = 1 / link.s_per_byte,
          .intra_latency_s = link.latency_s,
          .inter_latency_s = link.latency_s,

          .product_efficiency = 1,
          .memory_efficiency = 1,
          .intra_efficiency = 1,
          .inter_efficiency = 1,
          .contention = 0,
          .attention = {{"flash2",
                         {.flops = 4 * kHead / std::max(key, 1e-15), .half_tokens = 2 * query / std::max(key, 1e-15)}}},
          .processors = machine->identity.processors,
          .measured = machine};
}

void set_measured_times(const Case& c, const Machine& machine, Prediction& out) {
  if (c.software.name != "tessera" || c.model.experts > 0 || c.model.gated != (c.model.positions == Positions::rope))
    throw FieldError("hardware",
                     "this machine was measured with Tessera's own kernels; expected `software` tessera and a model "
                     "that it trains");
  Clock(c, machine).set(out);
}

}  // namespace tessera::planner
