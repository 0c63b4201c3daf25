// One assumption after another, a little wrong, then more.
#include "planner/assumptions.h"

#include <fmt/format.h>

#include <array>
#include <functional>
#include <optional>
#include <vector>

namespace tessera::planner {
namespace {

constexpr std::array kFactors = {1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0};

struct Assumption {
  const char* what;
  std::function<void(Hardware&, double factor)> scale;
};

std::vector<Assumption> assumptions(const Question& q) {
  std::vector<Assumption> out = {
      {"the rate of products", [](Hardware& h, double f) { h.peak_flops *= f; }},
      {"the rate of memory", [](Hardware& h, double f) { h.hbm_bytes_per_s *= f; }},
      {"the rate of attention",
       [](Hardware& h, double f) {
         for (auto& [kernel, rate] : h.attention) rate.flops *= f;
       }},
      {"the rate of links within a node", [](Hardware& h, double f) { h.intra_bytes_per_s *= f; }},
      {"what computing suffers from communication beside it", [](Hardware& h, double f) { h.contention *= f; }},
      {"the time that a message and a kernel take to start",
       [](Hardware& h, double f) { h.intra_latency_s *= f, h.inter_latency_s *= f, h.launch_s *= f; }}};
  if (q.ranks > q.hardware.ranks_per_node)
    out.push_back({"the rate of links between nodes", [](Hardware& h, double f) { h.inter_bytes_per_s *= f; }});
  return out;
}

// Seconds of the answer's plans, by closed forms that are set right by the simulation.
std::vector<double> times(const Question& q, const Answer& a) {
  std::vector<double> out;
  for (const Candidate& c : a.best) out.push_back(estimate(case_of(q, c.layout)).step_s);
  return out;
}

// Who wins instead of the first.
std::optional<size_t> turned(const Question& q, const Answer& a, const std::vector<double>& usual) {
  const std::vector<double> changed = times(q, a);
  size_t best = 0;
  const auto seconds = [&](size_t i) { return a.best[i].prediction.step_s * changed[i] / usual[i]; };
  for (size_t i = 1; i < changed.size(); ++i)
    if (seconds(i) < seconds(best)) best = i;
  return best == 0 ? std::nullopt : std::optional(best);
}

}  // namespace

std::string weakest_assumption(const Question& q, const Answer& a) {
  const std::vector<double> usual = times(q, a);
  for (const double factor : kFactors)
    for (const Assumption& assumption : assumptions(q))
      for (const bool more : {false, true}) {
        Question other = q;
        assumption.scale(other.hardware, more ? factor : 1 / factor);
        if (const auto winner = turned(other, a, usual))
          return fmt::format("{}: were it {} times {}, number {} would win ({})", assumption.what, factor,
                             more ? "larger" : "smaller", *winner + 1, to_text(a.best[*winner].layout.plan));
      }
  return "none alone: each rate four times larger or smaller leaves this plan the fastest of those listed";
}

}  // namespace tessera::planner
