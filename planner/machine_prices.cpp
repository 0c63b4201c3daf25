// Cost model of this machine: a rank's times depend on the number of busy ranks.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "planner/memory.h"
#include "planner/pipeline.h"
#include "planner/prices.h"

namespace tessera::planner {
namespace {

Sizes task_sizes(const Task& t) {
  if (*t.kernel <= Kernel::matmul_weight) return matmul_sizes(t.rows, t.columns, t.inner);
  return *t.kernel <= Kernel::attention_backward ? attention_sizes(t.rows, t.columns, t.inner, t.head_dim)
                                                 : row_sizes(t.rows, t.columns);
}

// Work of a pipeline rank after a step's passes, and its communication over the data axis.
struct Update {
  std::vector<Task> tasks = {};
  std::vector<Sent> sent = {};                // once per step
  std::vector<Sent> gathers = {}, sums = {};  // per micro-batch: parameters (ZeRO-3), gradients (ZeRO-2 and 3)
  double messages = 0;                        // all-reduces of loss and norm
};

class Clock {
 public:
  Clock(const Case& c, const Machine& machine)
      : c_(c),
        m_(machine),
        ranks_(p_.ranks()),
        threads_(p_.threads_per_rank > 0 ? p_.threads_per_rank : std::max<int64_t>(1, machine.identity.cores / ranks_)),
        schedule_(make_schedule(p_)),
        layers_(layer_range(c, own_job(c))) {
    for (size_t i = 0; i < layers_.size(); ++i) add_update(i);
  }

  // Except for the bubble, assumes that all ranks are busy.
  void set(Prediction& out) const {
    const double all = real(ranks_), each = real(ranks_ / p_.pp), m = real(p_.microbatches), pp = real(p_.pp);
    std::map<std::pair<size_t, int>, StageTimes> known;
    const Simulation sim = simulate_shared(schedule_, [&](const Action& a, int working) {
      const auto i = static_cast<size_t>(a.stage);
      const auto [at, made] = known.try_emplace({i, working});
      if (made) at->second = times(i, working * each);
      return pass_time(at->second, a.what);
    });
    out.stages.clear();
    out.message_s = 0;
    Parts& parts = out.parts = {};
    for (size_t i = 0; i < layers_.size(); ++i) {
      out.stages.push_back(times(i, pp * each));
      const Parts stage_parts = stage(i, all).parts;
      for (const auto& [name, part] : kParts) parts.*part += m / pp * stage_parts.*part;
    }
    double slowest = 0;
    for (const Update& u : updates_) {
      parts.dp += m * (of(u.gathers, all) + of(u.sums, all)) / pp;
      const double optimizer = of(u.tasks, all),
                   dp = of(u.sent, all) + u.messages * m_.seconds(Exchange::all_reduce, ranks_, 0);
      if (optimizer + dp <= slowest) continue;
      slowest = optimizer + dp;
      parts.optimizer = optimizer;
    }
    parts.dp += slowest - parts.optimizer;
    out.step_s = sim.makespan + slowest;
    parts.bubble = std::max(0.0, out.step_s - (parts.sum() - parts.bubble));
    out.bubble = sim.makespan * sim.bubble_fraction() / out.step_s;
  }

 private:
  double of(const std::vector<Task>& tasks, double busy) const {
    double sum = 0;
    for (const Task& t : tasks)
      if (t.kernel) sum += t.count * m_.seconds(*t.kernel, task_sizes(t), dtype_, threads_, busy);
    return sum;
  }
  double of(const std::vector<Sent>& sent, double busy, std::string_view axis = "") const {
    const double p = real(m_.identity.cores);
    double sum = 0;
    for (const Sent& s : sent) {
      if (s.axis.ranks < 2 || (!axis.empty() && s.axis.name != axis)) continue;
      // Latency includes waiting for the core shared with other ranks; copies use a fraction of a core.
      const double latency = m_.seconds(s.exchange, ranks_, 0),
                   bytes = m_.seconds(s.exchange, s.axis.ranks, s.bytes) - m_.seconds(s.exchange, s.axis.ranks, 0);
      sum += s.count * (latency + bytes * std::max(1.0, busy / p) / std::max(1.0, real(s.axis.ranks) / p));
    }
    return sum;
  }

  WorkTime time(const Work& w, double busy) const {
    const auto sent = [&](std::string_view axis) {
      return Passes{of(w.forward.sent, busy, axis), of(w.input.sent, busy, axis) + of(w.recompute.sent, busy, axis), 0};
    };
    return {.compute = {of(w.forward.tasks, busy), of(w.input.tasks, busy), of(w.weight.tasks, busy)},
            .recompute = of(w.recompute.tasks, busy),
            .tp = sent("tp"),
            .cp = sent("cp")};
  }

  StageTime stage(size_t i, double busy) const {
    StageTime out;
    out.add(real(layers_[i]), time(work_.layer, busy));
    const bool first = i == 0, last = i + 1 == layers_.size();
    if (first) out.add(1, time(work_.first, busy));
    if (last) out.add(1, time(work_.last, busy));
    // Micro-batches after the first accumulate their gradients; a tied table accumulates two gradients.
    const double m = real(p_.microbatches), table = real(c_.model.vocab) / real(p_.tp) * real(c_.model.channels);
    Work sums;
    sums.weight.tasks = {
        {.kernel = Kernel::accumulate, .rows = 1, .columns = elements(i), .count = (m - 1) / m},
        {.kernel = Kernel::accumulate, .rows = 1, .columns = table, .count = first && last && c_.model.tied ? 1.0 : 0}};
    out.add(1, time(sums, busy));
    return out;
  }

  // All-gathers are split over both passes; reductions belong to W. Sender and receiver are each charged half of a
  // message.
  StageTimes times(size_t i, double busy) const {
    const Passes all = stage(i, busy).all;
    const Update& u = updates_[static_cast<size_t>(schedule_.rank_of_stage[i])];
    const double chunks = schedule_.chunks(), gathers = of(u.gathers, busy) / chunks, sums = of(u.sums, busy) / chunks;
    const auto s = static_cast<int>(i);
    const int sides =
        (s > 0 && schedule_.crosses(s - 1) ? 1 : 0) + (s + 1 < schedule_.stages && schedule_.crosses(s) ? 1 : 0);
    const double message =
        sides * of({{Exchange::send, {"pp", 2}, handed_bytes(c_, real(element_size(dtype_))), 0.5}}, busy);
    StageTimes t{.forward = all.forward + gathers / 2 + message,
                 .input = all.input + gathers / 2 + message,
                 .weight = all.weight + sums};
    t.backward = t.input + t.weight;
    return t;
  }

  double elements(size_t i) const { return stage_parameters(c_, layers_[i], i == 0, i + 1 == layers_.size()).all(); }
  void add_update(size_t i) {
    const bool first = i == 0, last = i + 1 == layers_.size();
    const Axis data = data_axis(c_.layout);
    Update& u = updates_[static_cast<size_t>(schedule_.rank_of_stage[i])];
    const double all = elements(i), units = real(layers_[i]) + (first ? 2 : 0) + (last ? 1 : 0),
                 local = p_.zero == ZeroStage::none ? all : all / real(data.ranks);
    const auto add_task = [&](Kernel kernel, double count) {
      u.tasks.push_back({.kernel = kernel, .rows = units, .columns = local / units, .count = count});
    };
    add_task(Kernel::squares, 1);
    add_task(Kernel::update, 1);
    u.messages = (ranks_ > 1 ? 1 : 0) + (p_.pp > 1 ? 1 : 0) + (p_.tp > 1 ? 1 : 0) +
                 (p_.zero != ZeroStage::none && data.ranks > 1 ? 1 : 0);
    if (first && !last && c_.model.tied)
      u.sent.push_back({Exchange::all_reduce,
                        {"tied", 2},
                        c_.software.reduce_bytes * real(c_.model.vocab) / real(p_.tp) * real(c_.model.channels)});
    for (const DataSent& s : data_work(c_)) {
      const bool gathers = s.exchange == Exchange::all_gather;
      const double count = s.exchange == Exchange::all_reduce
                               ? std::max(1.0, std::ceil(all * s.bytes / (p_.bucket_mb * 1048576)))
                               : units;
      (!s.each ? u.sent : gathers ? u.gathers : u.sums).push_back({s.exchange, data, all * s.bytes / count, count});
      if (s.each && !gathers)  // accumulates reduced shards
        add_task(Kernel::accumulate, real(p_.microbatches) - 1);
    }
  }

  const Case& c_;
  const Machine& m_;
  const Plan& p_ = c_.layout.plan;
  DType dtype_ = c_.software.parameter_bytes < 4 ? DType::bfloat16 : DType::float32;
  int64_t ranks_, threads_;
  Schedule schedule_;
  std::vector<int64_t> layers_;
  StepWork work_ = step_work(c_, Caller::tessera);
  std::vector<Update> updates_{static_cast<size_t>(p_.pp)};
};

}  // namespace

Hardware find_hardware(const std::shared_ptr<const Machine>& machine, DType dtype) {
  // For head_dim 64: seconds per query, and per key (a causal query attends to half of the keys).
  constexpr double kHead = 64;
  const size_t type = dtype == DType::bfloat16 ? 1 : 0;
  const Cost& attention =
      machine->costs[static_cast<size_t>(MachineLoad::alone)][type][static_cast<size_t>(Kernel::attention_forward)];
  const double query = attention[1] * kHead, key = std::max(attention[2] + attention[3] * kHead, 1e-15);
  const double p = real(machine->identity.cores);
  LinkCost link = machine->links[static_cast<size_t>(Exchange::send)].begin()->second;
  link.s_per_byte = std::max(link.s_per_byte, 1e-13);  // the fit may return 0
  return {.name = "this",
          .peak_flops = machine->product_flops_per_s[type] / p,
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
          .attention = {{"flash2", {.flops = 4 * kHead / key, .half_tokens = 2 * query / key}}},
          .cores = machine->identity.cores,
          .measured = machine};
}

bool has_measured_times(const Case& c) {
  return c.software.name == "tessera" && c.model.experts.count == 0 &&
         c.model.gated == (c.model.encoding == Positions::rope);
}

void set_measured_times(const Case& c, const Machine& machine, Prediction& out) {
  if (!has_measured_times(c))
    throw FieldError("hardware",
                     "the measurement of this machine covers only Tessera's kernels; expected `software` tessera and a "
                     "model that Tessera can train");
  Clock(c, machine).set(out);
}

}  // namespace tessera::planner
