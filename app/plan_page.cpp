// The parts of the page, from what the report's are made of.
#include "app/plan_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "app/report/parts.h"
#include "app/report/svg.h"
#include "parallel/pipeline/simulate.h"
#include "train/names.h"

namespace tessera {
namespace {

using namespace report;
using planner::Candidate;
using planner::MemoryParts;
using planner::Prediction;

constexpr double kBar = 420;
constexpr int64_t kMostBoxes = 5000;  // that a browser draws at once
constexpr size_t kMostRows = 64;

constexpr std::array<std::pair<const char*, double MemoryParts::*>, 6> kCategories = {
    {{"parameters", &MemoryParts::parameters},
     {"gradients", &MemoryParts::gradients},
     {"optimizer", &MemoryParts::optimizer},
     {"activations", &MemoryParts::activations},
     {"workspace", &MemoryParts::workspace},
     {"communication", &MemoryParts::communication}}};

std::string cells(const std::vector<std::string>& texts, const std::vector<std::string>& numbers) {
  std::string out = "<tr>";
  for (const std::string& t : texts) out += "<td>" + escaped(t) + "</td>";
  for (const std::string& n : numbers) out += "<td class=\"n\">" + escaped(n) + "</td>";
  return out + "</tr>\n";
}

std::string heads(const std::vector<std::string>& texts, const std::vector<std::string>& numbers) {
  std::string out = "<thead><tr>";
  for (const std::string& t : texts) out += "<th>" + escaped(t) + "</th>";
  for (const std::string& n : numbers) out += "<th class=\"n\">" + escaped(n) + "</th>";
  return out + "</tr></thead>\n";
}

std::string list(const std::vector<std::string>& lines) {
  std::string out = "<ul>\n";
  for (const std::string& line : lines) out += "<li>" + escaped(line) + "</li>\n";
  return out + "</ul>\n";
}

std::vector<std::string> layout_cells(const planner::Layout& l) {
  return {axes_words(l), l.plan.zero == ZeroStage::none ? "-" : std::to_string(static_cast<int>(l.plan.zero)),
          fmt::format("{} x {}", l.plan.microbatches, l.sequences), std::string(text_of(l.plan.recompute)),
          schedule_words(l)};
}

const MemoryParts& fullest(const Candidate& c) { return c.prediction.memory[c.prediction.fullest]; }

std::string head_part(const PlanAnswer& a) {
  std::string out = "<section id=\"plan\">\n<h1>A plan for " + escaped(a.asked.model) + "</h1>\n<p class=\"model\">" +
                    escaped(question_words(a.asked)) + "</p>\n";
  if (!a.fits()) return out + "<p class=\"warn\">No plan fits the memory.</p>\n</section>\n";
  const planner::Recommendation& r = a.recommended;
  out += "<h2>Take " + escaped(to_text(r.plan.layout.plan)) + "</h2>\n" + list(r.why);
  out += "<p>Weakest assumption: " + escaped(r.weakest_assumption) + "</p>\n";
  out += "<pre id=\"command\" style=\"white-space: pre-wrap\">" + escaped(a.command) + "</pre>\n";
  return out + "</section>\n";
}

std::string fullest_words(const PlanAnswer& a, const Candidate& c) {
  return (a.is_rough(c) ? "~" : "") + short_bytes(fullest(c).peak());
}

std::string ranking_part(const PlanAnswer& a) {
  const std::vector<std::string> layout = {"ranks", "ZeRO", "micro-batches", "recompute", "schedule"};
  std::vector<std::string> words = layout;
  words.insert(words.begin(), "#");
  std::string out =
      "<section id=\"ranking\">\n<h2>The best plans</h2>\n<p>Fastest first; micro-batches: how many in a step, and "
      "the sequences of each; ~: by a formula; a dry run would be exact.</p>\n<table id=\"best\">" +
      heads(words, {"s/step", "tokens/s", "MFU", "bubble", "fullest rank"}) + "<tbody>\n";
  for (size_t i = 0; i < a.found.best.size(); ++i) {
    const Candidate& c = a.found.best[i];
    words = layout_cells(c.layout);
    words.insert(words.begin(), std::to_string(i + 1));
    const Prediction& p = c.prediction;
    out += cells(words, {step_words(p), grouped(static_cast<int64_t>(p.tokens_per_s)), percent(p.mfu),
                         percent(p.bubble), fullest_words(a, c)});
  }
  out += "</tbody></table>\n";
  if (a.found.too_large.empty()) return out + "</section>\n";
  out += fmt::format("<h3>Does not fit {}</h3>\n<table id=\"too-large\">", short_bytes(a.asked.memory())) +
         heads(layout, {"fullest rank", "too much", "most of it"}) + "<tbody>\n";
  for (const Candidate& c : a.found.too_large)
    out += cells(layout_cells(c.layout),
                 {fullest_words(a, c), short_bytes(c.prediction.over_bytes), c.prediction.largest});
  return out + "</tbody></table>\n</section>\n";
}

// A bar for each pipeline rank, with the line that it may not cross.
std::string memory_part(const PlanAnswer& a, const Candidate& c) {
  const double limit = a.asked.memory();
  const std::vector<MemoryParts>& ranks = c.prediction.memory;
  const size_t drawn = std::min(kMostRows, ranks.size());
  double most = limit;
  for (const MemoryParts& m : ranks) most = std::max(most, m.peak());
  std::vector<LegendEntry> entries;
  for (size_t k = 0; k < kCategories.size(); ++k) entries.push_back({fmt::format("m{}", k), kCategories[k].first});
  Bars bars{.title = "memory by pipeline rank",
            .bars = {},
            .most = most,
            .limit = limit,
            .limit_words = "limit " + short_bytes(limit)};
  for (size_t r = 0; r < drawn; ++r) {
    Bar& bar = bars.bars.emplace_back();
    bar.name = fmt::format("pipeline rank {}", r);
    bar.total = short_bytes(ranks[r].peak());
    for (size_t k = 0; k < kCategories.size(); ++k) {
      const double bytes = ranks[r].*kCategories[k].second;
      bar.parts.push_back({fmt::format("m{}", k),
                           fmt::format("{} | {}: {}", bar.name, kCategories[k].first, short_bytes(bytes)), bytes});
    }
  }
  std::string out = "<section id=\"memory\">\n<h2>Memory at the peak, by pipeline rank</h2>\n" + legend(entries) +
                    inline_svg(bars_picture(bars));
  if (drawn < ranks.size())
    out += fmt::format("<p class=\"note\">The first {} of {} are drawn.</p>\n", drawn, ranks.size());
  return out + "</section>\n";
}

// Of many micro-batches as many as a browser can draw.
std::string pipeline_part(const Candidate& c) {
  const Plan& p = c.layout.plan;
  if (p.pp == 1) return "";
  Plan shown = p;
  const int64_t each = 3 * p.pp * std::max<int64_t>(1, p.chunks);
  shown.microbatches = std::min(p.microbatches, std::max(p.pp, kMostBoxes / each / p.pp * p.pp));
  Times times{.stages = c.prediction.stages, .message = 1e3 * c.prediction.message_s};
  for (StageTimes& t : times.stages) t.forward *= 1e3, t.backward *= 1e3, t.input *= 1e3, t.weight *= 1e3;
  const Simulation sim = simulate(schedule_of(shown), times);
  std::string out =
      fmt::format("<section id=\"pipeline\">\n<h2>Pipeline: {}</h2>\n", escaped(schedule_words(c.layout)));
  std::vector<LegendEntry> entries = {{"k-F", "forward"}};
  if (sim.schedule.has(Do::B)) entries.push_back({"k-B", "backward"});
  if (sim.schedule.has(Do::I)) entries.push_back({"k-I", "input gradient"});
  if (sim.schedule.has(Do::W)) entries.push_back({"k-W", "weight gradient"});
  entries.push_back({"idle", "idle"});
  out += legend(entries) + panel_svg({sim, fmt::format("{} micro-batches on the predicted times", shown.microbatches),
                                      std::max(sim.makespan, 1e-9), true});
  if (shown.microbatches < p.microbatches)
    out += fmt::format("<p class=\"note\">A step has {} micro-batches; the pattern in the middle repeats.</p>\n",
                       p.microbatches);
  return out + "</section>\n";
}

std::string bar(double value, double most, const std::string& css, const std::string& tip) {
  return fmt::format("<td><svg class=\"bar\" viewBox=\"0 0 {} 14\" aria-hidden=\"true\">", kBar) +
         (value > 0 ? box({0, 1, kBar * value / most, 12}, css, tip) : "") + "</svg></td>";
}

std::string time_part(const Candidate& c) {
  const planner::Parts& t = c.prediction.parts;
  const std::array<std::tuple<const char*, double, const char*>, 8> parts = {{{"compute", t.compute, "k-F"},
                                                                              {"recomputation", t.recompute, "k-I"},
                                                                              {"bubble", t.bubble, "k-fin"},
                                                                              {"tp, exposed", t.tp, "a-tp"},
                                                                              {"cp, exposed", t.cp, "a-cp"},
                                                                              {"ep, exposed", t.ep, "a-world"},
                                                                              {"dp, exposed", t.dp, "a-dp"},
                                                                              {"optimizer", t.optimizer, "k-opt"}}};
  std::string out =
      "<section id=\"time\">\n<h2>Where a step's time goes</h2>\n<p>Of the slowest rank. Communication counts "
      "only if computing does not hide it.</p>\n<table>" +
      heads({"part"}, {"time", "share"}) + "<tbody>\n";
  for (const auto& [name, s, css] : parts)
    out += fmt::format("<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>", name, short_time(1e3 * s),
                       percent(s / c.prediction.step_s)) +
           bar(s, c.prediction.step_s, css, fmt::format("{} | {}", name, short_time(1e3 * s))) + "</tr>\n";
  return out + "</tbody></table>\n</section>\n";
}

std::string bytes_part(const Candidate& c) {
  double most = 1;
  for (const auto& [axis, operations] : c.prediction.bytes)
    for (const auto& [operation, bytes] : operations) most = std::max(most, bytes);
  std::string out = "<section id=\"bytes\">\n<h2>Bytes that a rank sends in a step</h2>\n<table>" +
                    heads({"axis", "operation"}, {"bytes"}) + "<tbody>\n";
  for (const auto& [axis, operations] : c.prediction.bytes)
    for (const auto& [operation, bytes] : operations)
      out += fmt::format("<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td>", escaped(axis), escaped(operation),
                         short_bytes(bytes)) +
             bar(bytes, most, "a-" + (axis == "ep" ? "world" : axis),
                 fmt::format("{} {} | {}", axis, operation, short_bytes(bytes))) +
             "</tr>\n";
  return out + "</tbody></table>\n</section>\n";
}

std::string instead_part(const PlanAnswer& a) {
  std::string out = "<section id=\"instead\">\n<h2>What other choices cost</h2>\n<table>" +
                    heads({"plan", "beside the one above"}, {}) + "<tbody>\n";
  for (const planner::WhyNot& w : a.recommended.why_not) out += cells({to_text(w.layout.plan), w.because}, {});
  return out + "</tbody></table>\n</section>\n";
}

}  // namespace

std::string plan_page(const PlanAnswer& a) {
  std::string main = head_part(a) + ranking_part(a);
  if (a.fits() || !a.found.too_large.empty()) {
    const Candidate& c = a.fits() ? a.recommended.plan : a.found.too_large.front();
    main += memory_part(a, c) + pipeline_part(c) + time_part(c) + bytes_part(c);
  }
  if (a.fits()) main += instead_part(a);
  return whole_page(a.asked.model + ", a plan of Tessera", main);
}

}  // namespace tessera
