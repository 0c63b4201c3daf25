// Tables and sentences.
#include "app/plan/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "app/options.h"
#include "planner/case_json.h"
#include "tensor/error.h"
#include "train/job.h"

namespace tessera {

namespace {

using planner::Candidate;
using planner::Layout;
using Row = std::vector<std::string>;

constexpr size_t kMostAlternatives = 8;

// Columns as wide as what stands in them; the first `left` begin at the left.
std::string table(const std::vector<Row>& rows, size_t left) {
  std::vector<size_t> widths(rows[0].size(), 0);
  for (const Row& row : rows)
    for (size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  std::string out;
  for (const Row& row : rows) {
    std::string line = " ";
    for (size_t c = 0; c < row.size(); ++c)
      line += c < left ? fmt::format(" {:<{}}", row[c], widths[c] + 1) : fmt::format(" {:>{}}", row[c], widths[c] + 1);
    out += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return out;
}

Row layout_cells(const Layout& l) {
  return {axes_words(l), l.plan.zero == ZeroStage::none ? "-" : std::to_string(static_cast<int>(l.plan.zero)),
          fmt::format("{} x {}", l.plan.microbatches, l.sequences), std::string(text_of(l.plan.recompute)),
          schedule_words(l)};
}

std::string gb_words(const PlanAnswer& a, const Candidate& c) {
  return fmt::format("{}{:.1f}", a.is_rough(c) ? "~" : "", c.prediction.memory[c.prediction.fullest].peak() / 1e9);
}

std::string fitting(const PlanAnswer& a) {
  std::vector<Row> rows = {
      {"#", "ranks", "ZeRO", "micro-batches", "recompute", "schedule", "s/step", "tokens/s", "MFU", "bubble", "GB"}};
  for (const Candidate& c : a.found.best) {
    Row row = {std::to_string(rows.size())};
    for (std::string& cell : layout_cells(c.layout)) row.push_back(std::move(cell));
    const planner::Prediction& p = c.prediction;
    row.push_back(step_words(p));
    row.push_back(fmt::format("{:.0f}", p.tokens_per_s));
    row.push_back(fmt::format("{:.1f}%", 100 * p.mfu));
    row.push_back(fmt::format("{:.1f}%", 100 * p.bubble));
    row.push_back(gb_words(a, c));
    rows.push_back(std::move(row));
  }
  const bool rough = std::ranges::any_of(rows, [](const Row& row) { return row.back().starts_with('~'); });
  return table(rows, 6) +
         fmt::format("  micro-batches: how many a step has x the sequences of each; GB: of the fullest rank{}\n",
                     rough ? ", ~ by a formula" : "");
}

std::string not_fitting(const PlanAnswer& a) {
  std::vector<Row> rows = {{"ranks", "ZeRO", "micro-batches", "recompute", "schedule", "GB", "too much", "most of it"}};
  for (const Candidate& c : a.found.too_large) {
    if (rows.size() > 5) break;
    Row row = layout_cells(c.layout);
    row.push_back(gb_words(a, c));
    row.push_back(fmt::format("{:.1f}", c.prediction.over_bytes / 1e9));
    row.push_back(c.prediction.largest);
    rows.push_back(std::move(row));
  }
  return fmt::format("Does not fit {:.1f} GB:\n", a.asked.memory() / 1e9) + table(rows, 5);
}

nlohmann::ordered_json layout_json(const Layout& l) {
  nlohmann::ordered_json out = to_json(l);
  if (l.plan.cp > 1) out["cp_mode"] = text_of(l.plan.cp_mode);
  return out;
}

}  // namespace

std::string axes_words(const Layout& l) {
  const Plan& p = l.plan;
  std::string out;
  const auto axis = [&](const char* name, int64_t size) {
    if (size > 1) out += fmt::format("{}{} {}", out.empty() ? "" : " x ", name, size);
  };
  axis("pp", p.pp), axis("dp", p.dp), axis("cp", p.cp), axis("tp", p.tp);
  if (p.sp) out += "+sp";
  if (l.ep > 1) out += fmt::format(", ep {}", l.ep);
  if (p.cp > 1 && p.cp_mode == ContextMode::ulysses) out += " (ulysses)";
  return out.empty() ? "one rank" : out;
}

std::string schedule_words(const Layout& l) {
  if (l.plan.pp == 1) return "-";
  const std::string name(text_of(l.plan.schedule));
  return l.plan.schedule == ScheduleKind::interleaved ? fmt::format("{} {}", name, l.plan.chunks) : name;
}

std::string step_words(const planner::Prediction& p) {
  const int digits = p.step_s < 0.1 ? 4 : p.step_s < 10 ? 3 : 1;
  std::string step = fmt::format("{:.{}f}", p.step_s, digits);
  if (p.fastest_s == p.slowest_s) return step;
  return fmt::format("{} ({:.{}f}-{:.{}f})", step, p.fastest_s, digits, p.slowest_s, digits);
}

std::string question_words(const PlanQuestion& asked) {
  const planner::Question& q = asked.question;
  const double tokens = static_cast<double>(q.batch) * static_cast<double>(q.model.context);
  const std::string active = q.model.experts > 0 ? fmt::format(", {:.2f} billion of them for a token",
                                                               planner::active_parameters(q.model) / 1e9)
                                                 : "";
  return fmt::format(
      "{}: {:.2f} billion parameters{}, {} layers, context {}, vocabulary {}\n"
      "{} rank{} of {}, {:.1f} GB for each, {} in a node; {} sequences a step = {:.4g} million tokens; software {}, {} "
      "attention\n",
      asked.model, planner::parameters(q.model) / 1e9, active, q.model.layers, q.model.context, q.model.vocab, q.ranks,
      q.ranks == 1 ? "" : "s", q.hardware.name, asked.memory() / 1e9, q.hardware.ranks_per_node, q.batch, tokens / 1e6,
      q.software.name, q.software.attention);
}

std::string plan_text(const PlanAnswer& a) {
  std::string out = question_words(a.asked) + "\n";
  if (a.fits()) out += fitting(a) + "\n";
  if (!a.found.too_large.empty()) out += not_fitting(a) + "\n";
  if (!a.fits()) return out;
  const planner::Recommendation& r = a.recommended;
  out += fmt::format("Take number 1: {}\n", to_text(r.plan.layout.plan));
  for (const std::string& why : r.why) out += "  - " + why + "\n";
  out += "Instead:\n";
  for (size_t i = 0; i < std::min(kMostAlternatives, r.why_not.size()); ++i)
    out += fmt::format("  - {}: {}\n", difference(r.why_not[i].layout.plan, r.plan.layout.plan), r.why_not[i].because);
  out += fmt::format("Weakest assumption: {}\n", r.weakest_assumption);
  out += "\nRun it:\n  " + a.command + "\n";
  for (const MeasuredPlan& plan : a.measured) out += "\n" + measured_text(plan);
  return out;
}

std::string plan_json_lines(const PlanAnswer& a) {
  const planner::Question& q = a.asked.question;
  std::string out;
  for (const auto* list : {&a.found.best, &a.found.too_large})
    for (const Candidate& c : *list) {
      nlohmann::ordered_json line = to_json(case_of(q, c.layout), c.prediction);
      line["plan"] = layout_json(c.layout);
      line["memory_by"] = c.described ? "formula" : "dry run";
      out += line.dump() + "\n";
    }
  for (const MeasuredPlan& plan : a.measured) {
    nlohmann::ordered_json line = measured_json(plan);
    line["plan"] = layout_json(plan.layout);
    out += line.dump() + "\n";
  }
  if (!a.fits()) return out;
  const planner::Recommendation& r = a.recommended;
  nlohmann::ordered_json last = {{"event", "recommendation"}, {"plan", layout_json(r.plan.layout)}, {"why", r.why}};
  last["why_not"] = nlohmann::ordered_json::array();
  for (const planner::WhyNot& w : r.why_not)
    last["why_not"].push_back({{"plan", layout_json(w.layout)}, {"because", w.because}});
  last["weakest_assumption"] = r.weakest_assumption;
  last["command"] = a.command;
  return out + last.dump() + "\n";
}

}  // namespace tessera
