// One assumption after another, a little wrong, then more.
#include "planner/assumptions.h"

#include <fmt/format.h>

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "planner/estimate.h"
#include "planner/machine.h"

namespace tessera::planner {
namespace {

constexpr std::array kFactors = {1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0};

struct Assumption {
  const char* what;
  std::function<void(Hardware&, double factor)> scale;
};

// A rate of the machine at hand: constants of its kernels, from one to another, are divided by it.
std::function<void(Hardware&, double)> kernels(Kernel first, Kernel last) {
  return [=](Hardware& h, double f) {
    auto other = std::make_shared<Machine>(*h.measured);
    for (auto& company : other->costs)
      for (auto& costs : company)
        for (auto k = static_cast<size_t>(first); k <= static_cast<size_t>(last); ++k)
          for (double& constant : costs[k]) constant /= f;
    h.measured = other;
  };
}

std::function<void(Hardware&, double)> links(double LinkCost::*part, bool rate) {
  return [=](Hardware& h, double f) {
    auto other = std::make_shared<Machine>(*h.measured);
    for (auto& exchange : other->links)
      for (auto& [ranks, link] : exchange) link.*part *= rate ? 1 / f : f;
    h.measured = other;
  };
}

std::vector<Assumption> assumptions(const Question& q) {
  if (q.hardware.measured)
    return {{"the rate of products", kernels(Kernel::product_forward, Kernel::product_weight)},
            {"the rate of memory", kernels(Kernel::norm_forward, Kernel::update)},
            {"the rate of attention", kernels(Kernel::attention_forward, Kernel::attention_backward)},
            {"the rate between ranks", links(&LinkCost::s_per_byte, true)},
            {"the time that a message takes to start", links(&LinkCost::latency_s, false)}};
  std::vector<Assumption> out = {
      {"the rate of products", [](Hardware& h, double f) { h.peak_flops *= f; }},
      {"the rate of memory", [](Hardware& h, double f) { h.hbm_bytes_per_s *= f; }},
      {"the rate of attention",
       [](Hardware& h, double f) {
         for (auto& [kernel, rate] : h.attention) rate.flops *= f;
       }},
      {"the rate of links within a node", [](Hardware& h, double f) { h.intra_bytes_per_s *= f; }},
      {"how much communication slows the computing beside it", [](Hardware& h, double f) { h.contention *= f; }},
      {"the time that a message and a kernel take to start",
       [](Hardware& h, double f) { h.intra_latency_s *= f, h.inter_latency_s *= f, h.launch_s *= f; }}};
  if (q.ranks > q.hardware.ranks_per_node)
    out.push_back({"the rate of links between nodes", [](Hardware& h, double f) { h.inter_bytes_per_s *= f; }});
  return out;
}

// Seconds of the answer's plans, by closed forms that are set right by the simulation.
std::vector<double> times(Estimator estimate, const Answer& a) {
  std::vector<double> out;
  for (const Candidate& c : a.best) out.push_back(estimate(c.layout).step_s);
  return out;
}

// Who wins instead of the first.
std::optional<size_t> turned(const Estimator& other, const Answer& a, const std::vector<double>& usual) {
  const std::vector<double> changed = times(other, a);
  size_t best = 0;
  const auto seconds = [&](size_t i) { return a.best[i].prediction.step_s * changed[i] / usual[i]; };
  for (size_t i = 1; i < changed.size(); ++i)
    if (seconds(i) < seconds(best)) best = i;
  return best == 0 ? std::nullopt : std::optional(best);
}

bool is_faster(Estimator on, const Layout& l, const Layout& than) {
  return on.simulated(l).step_s < on.simulated(than).step_s;
}

}  // namespace

std::optional<Turn> nearest_turn(const Question& q, const Answer& a) {
  const Estimator estimate(q);
  const std::vector<double> usual = times(estimate, a);
  for (const double factor : kFactors)
    for (const Assumption& assumption : assumptions(q))
      for (const bool larger : {false, true}) {
        Hardware other = q.hardware;
        assumption.scale(other, larger ? factor : 1 / factor);
        const auto winner = turned(estimate.on(other), a, usual);
        if (winner && is_faster(estimate.on(other), a.best[*winner].layout, a.best[0].layout))
          return Turn{assumption.what, factor, larger, other, *winner};
      }
  return {};
}

std::string weakest_assumption(const Question& q, const Answer& a) {
  const std::optional<Turn> turn = nearest_turn(q, a);
  if (!turn) return "none alone: each rate four times larger or smaller leaves this plan the fastest of those listed";
  return fmt::format("{}: were it {} times {}, number {} would win ({})", turn->what, turn->factor,
                     turn->larger ? "larger" : "smaller", turn->winner + 1, to_text(a.best[turn->winner].layout.plan));
}

}  // namespace tessera::planner
