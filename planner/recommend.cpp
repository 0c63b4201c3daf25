// Text and sensitivity analysis of a recommendation.
#include "planner/recommend.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "planner/machine.h"

namespace tessera::planner {
namespace {

constexpr double kTight = 0.92;    // memory fraction above which unmodelled usage may exceed the capacity
constexpr double kNothing = 1e-3;  // relative time difference reported as equal

std::string_view part_label(std::string_view part) { return part == "recompute" ? "recomputation" : part; }

std::string seconds(double s) { return s < 1 ? fmt::format("{:.1f} ms", 1e3 * s) : fmt::format("{:.2f} s", s); }

const MemoryParts& peak_rank(const Prediction& p) { return p.memory[p.peak_rank]; }

bool same_mesh(const Layout& a, const Layout& b) {
  const Plan &p = a.plan, &q = b.plan;
  return p.pp == q.pp && p.dp == q.dp && p.cp == q.cp && p.tp == q.tp;
}

std::string time_text(const Prediction& p) {
  std::string out;
  for (const auto& [name, part] : kParts)
    if (const double s = p.parts.*part; s > 0.005 * p.step_s)
      out += fmt::format("{}{:.0f}% {}", out.empty() ? "" : ", ", 100 * s / p.step_s, part_label(name));
  return "step time: " + out;
}

std::string memory_text(const SearchRequest& q, const SearchResult& a) {
  const Prediction& p = a.best[0].prediction;
  const auto is_tight = [&](const Candidate& c) {
    return peak_rank(c.prediction).peak() > kTight * q.hardware.usable_bytes();
  };
  std::string out = fmt::format("peak rank: {:.1f} of {:.1f} GB, mostly {}", peak_rank(p).peak() / 1e9,
                                q.hardware.usable_bytes() / 1e9, p.largest);
  if (!is_tight(a.best[0])) return out;
  out += "; tight, because fragmentation is not included";
  for (size_t i = 1; i < a.best.size(); ++i)
    if (!is_tight(a.best[i])) return out + fmt::format("; number {} has more headroom", i + 1);
  return out;
}

std::string node_text(const SearchRequest& q, const Plan& p) {
  const int64_t node = q.hardware.ranks_per_node;
  if (node <= 0 || q.ranks <= node) return "";
  std::string inside, across;
  int64_t width = 1;
  for (const auto& [name, size] : {std::pair{"tp", p.tp}, {"cp", p.cp}, {"dp", p.dp}, {"pp", p.pp}}) {
    if (size == 1) continue;
    width *= size;
    std::string& list = width <= node ? inside : across;
    list += fmt::format("{}{}", list.empty() ? "" : ", ", name);
  }
  return fmt::format("{}between nodes: {}",
                     inside.empty() ? "" : fmt::format("within a node of {} ranks: {}; ", node, inside), across);
}

std::string close_call_text(const SearchResult& a) {
  size_t last = 1;
  while (last < a.best.size() && a.best[last].prediction.step_s < (1 + kCloseCall) * a.best[0].prediction.step_s)
    ++last;
  if (last == 1) return "no other listed plan is within the model error of 4%";
  if (last == 2) return "too close to call: number 2 is within the model error of 4%";
  return fmt::format("too close to call: numbers 2 to {} are within the model error of 4%", last);
}

bool is_feasible(const SearchRequest& q, const Layout& l) {
  SearchRequest one = q;
  bool respected = true;
  each_choice(one.fixed, l, [&](const char*, auto& fixed, const auto& value) {
    respected = respected && (!fixed || *fixed == value);
    fixed = value;
  });
  if (respected) try {
      for (const Layout& base : bases(one))
        if (!variants(one, base).empty()) return true;
    } catch (const FieldError&) {
    }
  return false;
}

std::vector<Layout> neighbours(const SearchRequest& q, const Layout& l) {
  std::vector<Layout> out;
  const auto with = [&](const auto& change) {
    Layout other = l;
    change(other.plan, other);
    if (!(other == l) && is_feasible(q, other)) out.push_back(other);
  };
  constexpr std::array axes = {&Plan::tp, &Plan::pp, &Plan::cp, &Plan::dp};
  for (const auto more : axes)
    for (const auto less : axes) {
      if (more == less || l.plan.*less % 2 != 0) continue;
      with([&](Plan& p, Layout& o) {
        p.*more *= 2, p.*less /= 2;
        if (p.tp == 1) p.sp = false;
        if (p.pp == 1) p.schedule = ScheduleKind::one_f_one_b, p.chunks = 0;
        if (p.dp * p.cp == 1) p.zero = ZeroStage::none;
        p.microbatches = std::max<int64_t>(1, q.batch / (p.dp * o.sequences));
        o.sequences = q.batch / (p.dp * p.microbatches);
      });
    }
  for (const ZeroStage z : {ZeroStage::none, ZeroStage::one, ZeroStage::two, ZeroStage::three})
    if (l.plan.dp * l.plan.cp > 1) with([&](Plan& p, Layout&) { p.zero = z; });
  for (const Recompute r : {Recompute::none, Recompute::activation, Recompute::attention, Recompute::block})
    with([&](Plan& p, Layout&) { p.recompute = r; });
  if (l.plan.tp > 1) with([](Plan& p, Layout&) { p.sp = !p.sp; });
  if (l.plan.pp > 1)
    for (const ScheduleKind s : {ScheduleKind::one_f_one_b, ScheduleKind::interleaved, ScheduleKind::zb_h1,
                                 ScheduleKind::zb_h2, ScheduleKind::zb_v, ScheduleKind::v_half, ScheduleKind::v_min})
      with([&](Plan& p, Layout&) {
        p.chunks = s == ScheduleKind::interleaved ? (p.chunks > 0 ? p.chunks : 2) : 0;
        p.schedule = s;
      });
  with([](Plan& p, Layout& o) { p.microbatches *= 2, o.sequences /= 2; });
  if (l.plan.microbatches % 2 == 0) with([](Plan& p, Layout& o) { p.microbatches /= 2, o.sequences *= 2; });
  return out;
}

std::vector<WhyNot> why_not(const SearchRequest& q, const SearchResult& a) {
  std::vector<WhyNot> out;
  const Candidate& best = a.best[0];
  for (size_t i = 1; i < a.best.size(); ++i)
    if (!same_mesh(a.best[i].layout, best.layout)) {
      out.push_back({a.best[i].layout, "runner-up: " + compared(a.best[i], best)});
      break;
    }
  Estimator estimate(q);  // predicts both plans by the same method
  const Candidate here{best.layout, estimate.simulated(best.layout)};
  for (const Layout& l : neighbours(q, best.layout))
    if (out.empty() || !(out[0].layout == l)) out.push_back({l, compared({l, estimate.simulated(l)}, here)});
  return out;
}

constexpr std::array kFactors = {1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0};

struct Assumption {
  const char* what;
  std::function<void(Hardware&, double factor)> scale;
};

// Scales the throughput of the measured kernels `first` to `last`.
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

std::vector<Assumption> assumptions(const SearchRequest& q) {
  if (q.hardware.measured)
    return {{"matmul throughput", kernels(Kernel::matmul_forward, Kernel::matmul_weight)},
            {"memory bandwidth", kernels(Kernel::norm_forward, Kernel::update)},
            {"attention throughput", kernels(Kernel::attention_forward, Kernel::attention_backward)},
            {"bandwidth between ranks", links(&LinkCost::s_per_byte, true)},
            {"message latency", links(&LinkCost::latency_s, false)}};
  std::vector<Assumption> out = {
      {"matmul throughput", [](Hardware& h, double f) { h.peak_flops *= f; }},
      {"memory bandwidth", [](Hardware& h, double f) { h.hbm_bytes_per_s *= f; }},
      {"attention throughput",
       [](Hardware& h, double f) {
         for (auto& [kernel, rate] : h.attention) rate.flops *= f;
       }},
      {"intra-node bandwidth", [](Hardware& h, double f) { h.intra_bytes_per_s *= f; }},
      {"slowdown of compute by overlapped communication", [](Hardware& h, double f) { h.contention *= f; }},
      {"latency of messages and kernel launches",
       [](Hardware& h, double f) { h.intra_latency_s *= f, h.inter_latency_s *= f, h.launch_s *= f; }}};
  if (q.ranks > q.hardware.ranks_per_node)
    out.push_back({"inter-node bandwidth", [](Hardware& h, double f) { h.inter_bytes_per_s *= f; }});
  return out;
}

std::vector<double> times(Estimator estimate, const SearchResult& a) {
  std::vector<double> out;
  for (const Candidate& c : a.best) out.push_back(estimate(c.layout).step_s);
  return out;
}

// The new fastest plan, if it changes; closed forms are calibrated with simulated times.
std::optional<size_t> new_winner(const Estimator& other, const SearchResult& a, const std::vector<double>& baseline) {
  const std::vector<double> changed = times(other, a);
  size_t best = 0;
  const auto seconds = [&](size_t i) { return a.best[i].prediction.step_s * changed[i] / baseline[i]; };
  for (size_t i = 1; i < changed.size(); ++i)
    if (seconds(i) < seconds(best)) best = i;
  return best == 0 ? std::nullopt : std::optional(best);
}

bool is_faster(Estimator on, const Layout& l, const Layout& than) {
  return on.simulated(l).step_s < on.simulated(than).step_s;
}

}  // namespace

std::string compared(const Candidate& other, const Candidate& best) {
  const Prediction &p = other.prediction, &b = best.prediction;
  if (!p.fits) return fmt::format("does not fit: {:.1f} GB over capacity, mostly {}", p.over_bytes / 1e9, p.largest);
  const double more = p.step_s / b.step_s - 1, memory = (peak_rank(p).peak() - peak_rank(b).peak()) / 1e9;
  std::string out = std::abs(more) < kNothing
                        ? "same time"
                        : fmt::format("{:.1f}% {}", 100 * std::abs(more), more > 0 ? "slower" : "faster");
  if (more >= kNothing) {
    const auto extra = [&](const auto& named) { return p.parts.*named.second - b.parts.*named.second; };
    const auto& largest = *std::ranges::max_element(kParts, {}, extra);
    out += fmt::format(": +{} {}", seconds(extra(largest)), part_label(largest.first));
  }
  if (std::abs(memory) >= 0.1)
    out += fmt::format("; {:.1f} GB {} on the peak rank", std::abs(memory), memory > 0 ? "more" : "less");
  return out;
}

Recommendation recommend(const SearchRequest& q, const SearchResult& a) {
  const Candidate& best = a.best.at(0);
  const Prediction& p = best.prediction;
  Recommendation r{.plan = best};
  r.why.push_back(fmt::format("fastest plan that fits: {} per step, {:.0f} tokens/s, {:.0f}% MFU", seconds(p.step_s),
                              p.tokens_per_s, 100 * p.mfu));
  r.why.push_back(time_text(p));
  r.why.push_back(memory_text(q, a));
  if (const std::string text = node_text(q, best.layout.plan); !text.empty()) r.why.push_back(text);
  r.why.push_back(close_call_text(a));
  r.why_not = why_not(q, a);
  r.weakest_assumption = weakest_assumption(q, a);
  return r;
}

std::optional<TippingPoint> nearest_tipping_point(const SearchRequest& q, const SearchResult& a) {
  const Estimator estimate(q);
  const std::vector<double> baseline = times(estimate, a);
  for (const double factor : kFactors)
    for (const Assumption& assumption : assumptions(q))
      for (const bool larger : {false, true}) {
        Hardware other = q.hardware;
        assumption.scale(other, larger ? factor : 1 / factor);
        const auto winner = new_winner(estimate.on(other), a, baseline);
        if (winner && is_faster(estimate.on(other), a.best[*winner].layout, a.best[0].layout))
          return TippingPoint{assumption.what, factor, larger, other, *winner};
      }
  return {};
}

std::string weakest_assumption(const SearchRequest& q, const SearchResult& a) {
  const std::optional<TippingPoint> turn = nearest_tipping_point(q, a);
  if (!turn) return "none: scaling any single assumption by up to 4x leaves this plan the fastest of the listed plans";
  return fmt::format("{}: if {} times {}, number {} would be the fastest ({})", turn->what, turn->factor,
                     turn->larger ? "larger" : "smaller", turn->winner + 1, to_text(a.best[turn->winner].layout.plan));
}

}  // namespace tessera::planner
