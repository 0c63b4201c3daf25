// An answer of the planner as one self-contained HTML file, made of parts as a report is.

#include "app/plan/plan.h"
#include "app/report/report.h"

namespace tessera {
namespace {

using namespace report;
using planner::Candidate;
using planner::MemoryParts;

constexpr int64_t kMostBoxes = 5000;  // that a browser draws at once
constexpr size_t kMostRows = 64;

constexpr std::array<std::pair<const char*, double MemoryParts::*>, 6> kShownParts = {
    {{"parameters", &MemoryParts::parameters},
     {"gradients", &MemoryParts::gradients},
     {"optimizer", &MemoryParts::optimizer},
     {"activations", &MemoryParts::activations},
     {"workspace", &MemoryParts::workspace},
     {"communication", &MemoryParts::communication}}};

Part head_part(const PlanAnswer& a) {
  Part out{.id = "plan", .title = "A plan for " + a.asked.model, .about = {question_words(a.asked)}};
  if (!a.fits()) {
    out.warning = "No plan fits the memory.";
    return out;
  }
  const planner::Recommendation& r = a.recommended;
  out.more = "<h2>Take " + escaped(to_text(r.plan.layout.plan)) + "</h2>\n" + list_html(r.why) +
             "<p>Weakest assumption: " + escaped(r.weakest_assumption) +
             "</p>\n<pre id=\"command\" style=\"white-space: pre-wrap\">" + escaped(a.command) + "</pre>\n";
  return out;
}

Part ranking_part(const PlanAnswer& a) {
  Part out{.id = "ranking",
           .title = "The best plans",
           .words =
               "Fastest first; micro-batches: how many in a step, and the sequences of each; ~: by a formula; a dry "
               "run would be exact."};
  const auto [best, large] = ranking_tables(a);
  out.tables = {best};
  if (!large.rows.empty()) out.tables.push_back(large);
  return out;
}

// A bar for each pipeline rank, with the line that it may not cross.
Part memory_part(const PlanAnswer& a, const Candidate& c) {
  Part out{.id = "memory", .title = "Memory at the peak, by pipeline rank"};
  const std::vector<MemoryParts>& ranks = c.prediction.memory;
  Lanes bars{.title = "",
             .most = a.asked.memory(),
             .right = kRoomForBytes,
             .limit = a.asked.memory(),
             .limit_words = "limit " + short_bytes(a.asked.memory())};
  for (const MemoryParts& m : ranks) bars.most = std::max(bars.most, m.peak());
  for (size_t r = 0; r < std::min(kMostRows, ranks.size()); ++r) {
    Lane bar{.name = fmt::format("pipeline rank {}", r), .behind = short_bytes(ranks[r].peak())};
    for (size_t k = 0; k < kShownParts.size(); ++k) {
      const std::string bytes = short_bytes(ranks[r].*kShownParts[k].second);
      stack(bar, ranks[r].*kShownParts[k].second, fmt::format("m{} pass", k),
            fmt::format("{} | {}: {}", bar.name, kShownParts[k].first, bytes), bytes);
    }
    bars.lanes.push_back(std::move(bar));
  }
  bars.left = left_of(bars.lanes);
  for (size_t k = 0; k < kShownParts.size(); ++k) out.legend.push_back({fmt::format("m{}", k), kShownParts[k].first});
  out.pictures = {drawn(bars)};
  if (kMostRows < ranks.size()) out.notes = {fmt::format("The first {} of {} are drawn.", kMostRows, ranks.size())};
  return out;
}

// The pipeline's picture has as many micro-batches as a browser can draw.
Part pipeline_part(const Candidate& c) {
  const Plan& p = c.layout.plan;
  Plan shown = p;
  const int64_t each = 3 * p.pp * std::max<int64_t>(1, p.chunks);
  shown.microbatches = std::min(p.microbatches, std::max(p.pp, kMostBoxes / each / p.pp * p.pp));
  Times times{.stages = c.prediction.stages, .message = 1e3 * c.prediction.message_s};
  for (StageTimes& t : times.stages) t.forward *= 1e3, t.backward *= 1e3, t.input *= 1e3, t.weight *= 1e3;
  const Simulation sim = simulate(schedule_of(shown), times);
  Part out{.id = "pipeline", .title = "Pipeline: " + schedule_words(c.layout), .legend = {{"k-F", "forward"}}};
  if (sim.schedule.has(Do::B)) out.legend.push_back({"k-B", "backward"});
  if (sim.schedule.has(Do::I)) out.legend.push_back({"k-I", "input gradient"});
  if (sim.schedule.has(Do::W)) out.legend.push_back({"k-W", "weight gradient"});
  out.legend.push_back({"idle", "idle"});
  out.pictures = {drawn(lanes_of({sim, fmt::format("{} micro-batches on the predicted times", shown.microbatches),
                                  std::max(sim.makespan, 1e-9)}))};
  if (shown.microbatches < p.microbatches)
    out.notes = {fmt::format("A step has {} micro-batches; the pattern in the middle repeats.", p.microbatches)};
  return out;
}

Part time_part(const Candidate& c) {
  const planner::Parts& t = c.prediction.parts;
  const std::array<std::tuple<const char*, double, const char*>, 8> parts = {{{"compute", t.compute, "k-F"},
                                                                              {"recomputation", t.recompute, "k-I"},
                                                                              {"bubble", t.bubble, "k-fin"},
                                                                              {"tp, exposed", t.tp, "a-tp"},
                                                                              {"cp, exposed", t.cp, "a-cp"},
                                                                              {"ep, exposed", t.ep, "a-world"},
                                                                              {"dp, exposed", t.dp, "a-dp"},
                                                                              {"optimizer", t.optimizer, "k-opt"}}};
  Table table{.id = "times", .columns = {{"part"}, {"time", true}, {"share", true}, {""}}};
  for (const auto& [name, s, css] : parts) {
    const std::string time = short_time(1e3 * s);
    const double share = s / c.prediction.step_s;
    table.rows.push_back({{name, time, percent(share), bar_cell(share, css, fmt::format("{} | {}", name, time))}});
  }
  return {.id = "time",
          .title = "Where a step's time goes",
          .words = "Of the slowest rank. Communication counts only if computing does not hide it.",
          .tables = {table}};
}

Part bytes_part(const Candidate& c) {
  Table table{.id = "sent", .columns = {{"axis"}, {"operation"}, {"bytes", true}, {""}}};
  double most = 1;
  for (const auto& [axis, operations] : c.prediction.bytes)
    for (const auto& [operation, bytes] : operations) most = std::max(most, bytes);
  for (const auto& [axis, operations] : c.prediction.bytes)
    for (const auto& [operation, bytes] : operations)
      table.rows.push_back({{axis, operation, short_bytes(bytes),
                             bar_cell(bytes / most, css_of_axis(axis),
                                      fmt::format("{} {} | {}", axis, operation, short_bytes(bytes)))}});
  return {.id = "bytes", .title = "Bytes that a rank sends in a step", .tables = {table}};
}

Part instead_part(const PlanAnswer& a) {
  Table table{.id = "others", .columns = {{"plan"}, {"beside the one above"}}};
  for (const planner::WhyNot& w : a.recommended.why_not) table.rows.push_back({{to_text(w.layout.plan), w.because}});
  return {.id = "instead", .title = "What other choices cost", .tables = {table}};
}

}  // namespace

std::string plan_page(const PlanAnswer& a) {
  std::vector<Part> parts = {head_part(a), ranking_part(a)};
  if (a.fits() || !a.found.too_large.empty()) {
    const Candidate& c = a.fits() ? a.recommended.plan : a.found.too_large.front();
    parts.push_back(memory_part(a, c));
    if (c.layout.plan.pp > 1) parts.push_back(pipeline_part(c));
    parts.push_back(time_part(c)), parts.push_back(bytes_part(c));
  }
  if (a.fits()) parts.push_back(instead_part(a));
  return whole_page(a.asked.model + ", a plan of Tessera", parts);
}

}  // namespace tessera
