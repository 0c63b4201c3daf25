// The planner's answer as text, JSON lines and an HTML page; layouts as options of `train`.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "app/plan/plan.h"
#include "app/report/report.h"
#include "app/resolve.h"
#include "planner/case_json.h"

namespace tessera {

namespace {

using planner::Candidate;
using planner::Layout;
using planner::MemoryParts;
using namespace report;

constexpr size_t kMaxAlternatives = 8, kMaxTooLarge = 5;

// "pp 2 x dp 4 x tp 2+sp", "one rank".
std::string axes_text(const Layout& l) {
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

// "zb-h1", "interleaved 4", or "-" without a pipeline.
std::string schedule_text(const Layout& l) {
  if (l.plan.pp == 1) return "-";
  const std::string name(value_name(l.plan.schedule));
  return l.plan.schedule == ScheduleKind::interleaved ? fmt::format("{} {}", name, l.plan.chunks) : name;
}

// "10.2", or "10.2 (9.1-11.3)" if the hardware specifies a range.
std::string step_text(const planner::Prediction& p) {
  const int digits = p.step_s < 0.1 ? 4 : p.step_s < 10 ? 3 : 1;
  std::string step = fmt::format("{:.{}f}", p.step_s, digits);
  if (p.fastest_s == p.slowest_s) return step;
  return fmt::format("{} ({:.{}f}-{:.{}f})", step, p.fastest_s, digits, p.slowest_s, digits);
}

std::string request_text(const PlanQuestion& asked) {
  const planner::SearchRequest& q = asked.question;
  const double tokens = static_cast<double>(q.batch) * static_cast<double>(q.model.context);
  const std::string active =
      q.model.experts > 0 ? fmt::format(", {:.2f} billion active per token", planner::active_parameters(q.model) / 1e9)
                          : "";
  return fmt::format(
      "{}: {:.2f} billion parameters{}, {} layers, context {}, vocabulary {}\n{} rank{} on {}, {:.1f} GB each, {} per "
      "node; {} sequences per step = {:.4g} million tokens; software {}, {} attention\n",
      asked.model, planner::parameters(q.model) / 1e9, active, q.model.layers, q.model.context, q.model.vocab, q.ranks,
      q.ranks == 1 ? "" : "s", q.hardware.name, asked.memory() / 1e9, q.hardware.ranks_per_node, q.batch, tokens / 1e6,
      q.software.name, q.software.attention);
}

std::vector<Cell> make_cells(const Layout& l) {
  return {axes_text(l), l.plan.zero == ZeroStage::none ? "-" : std::to_string(static_cast<int>(l.plan.zero)),
          fmt::format("{} x {}", l.plan.microbatches, l.sequences), std::string(value_name(l.plan.recompute)),
          schedule_text(l)};
}

Cell memory_cell(double bytes, const char* rough = "") {
  return {rough + report::short_bytes(bytes), fmt::format("{}{:.1f}", rough, bytes / 1e9)};
}

Cell peak_cell(const PlanAnswer& a, const Candidate& c) {
  return memory_cell(c.prediction.memory[c.prediction.peak_rank].peak(), a.is_rough(c) ? "~" : "");
}

nlohmann::ordered_json layout_json(const Layout& l) {
  nlohmann::ordered_json out = to_json(l);
  if (l.plan.cp > 1) out["cp_mode"] = value_name(l.plan.cp_mode);
  return out;
}

std::string for_shell(const std::string& text) {
  constexpr const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./+=:,";
  if (!text.empty() && text.find_first_not_of(plain) == std::string::npos) return text;
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

std::string model_args(const PlanOptions& o) {
  std::string out;
  if (std::ranges::none_of(o.args, [](const auto& w) { return chooses_job(w.first, w.second); }))
    out = " --model " + o.run.preset;  // prevents the default job
  TypedOptions run;
  const Settings all = field_descriptors(run);
  for (const auto& [name, text] : o.args) {
    if (name == "batch" || name == "dtype" || is_searched(name)) continue;
    out += all.find_word(name)->is_flag() ? fmt::format(" --{}{}", name, text == "true" ? "" : "=" + text)
                                          : fmt::format(" --{} {}", name, for_shell(text));
  }
  return out;
}

std::string model_args(const planner::ModelShape& m) {
  std::string out =
      fmt::format(" --family {} --layers {} --channels {} --heads {} --ffn {} --vocab {} --context {}",
                  m.gated ? "llama" : "gpt2", m.layers, m.channels, m.heads, m.hidden(), m.vocab, m.context);
  if (m.key_heads() != m.heads) out += fmt::format(" --kv-heads {}", m.key_heads());
  if (m.head_dim > 0) out += fmt::format(" --head-dim {}", m.head_dim);
  if (m.experts > 0) out += fmt::format(" --experts {} --experts-per-token {}", m.experts, m.experts_per_token);
  return out + (m.tied ? "" : " --untied");
}

std::string layout_args(const planner::Layout& l) {
  const Plan& p = l.plan;
  std::string out;
  const auto axis = [&](const char* name, int64_t size) {
    if (size > 1) out += fmt::format(" --{} {}", name, size);
  };
  axis("pp", p.pp), axis("cp", p.cp), axis("tp", p.tp);
  if (p.sp) out += " --sp";
  if (p.cp > 1) out += fmt::format(" --cp-mode {}", value_name(p.cp_mode));
  if (p.pp > 1) out += fmt::format(" --schedule {}", value_name(p.schedule));
  if (p.pp > 1 && p.schedule == ScheduleKind::interleaved) out += fmt::format(" --chunks {}", p.chunks);
  if (p.zero != ZeroStage::none) out += fmt::format(" --zero {}", static_cast<int>(p.zero));
  if (p.microbatches > 1) out += fmt::format(" --microbatches {}", p.microbatches);
  return p.recompute == Recompute::none ? out : out + fmt::format(" --recompute {}", value_name(p.recompute));
}

Cell compared_cell(const planner::Compared& c, double value) {
  return value_cell(
      c.part.starts_with("memory") ? fmt::format("{:.3f} MB", value / 1e6) : fmt::format("{:.3f} ms", value * 1e3),
      value);
}

std::string deviation(const planner::Compared& c) {
  return c.measured > 0 ? fmt::format("{:+.1f}%", 100 * (c.predicted / c.measured - 1)) : "";
}

Table measured_table(const MeasuredPlan& plan) {
  Table out{.id = "measured",
            .columns = {{"", false, 24, true, "part"},
                        {"predicted", true, 14, true, "predicted"},
                        {"measured", true, 14, true, "measured"},
                        {"", true, 9},
                        {"", false, 0, false, "off"}},
            .above = fmt::format("Measured plan {}: {}\n", plan.number, to_text(plan.layout.plan)),
            .indent = 2};
  std::string off;
  for (const planner::Compared& c : plan.parts) {
    out.rows.push_back(
        {{c.part, compared_cell(c, c.predicted), compared_cell(c, c.measured), deviation(c), value_cell("", c.off)}});
    if (c.off) off += (off.empty() ? "" : "; ") + c.part;
  }
  out.below = off.empty() ? "All predictions are within 15% of the measurements.\n"
                          : fmt::format("Off by more than 15%: {}.\n", off);
  return out;
}

std::array<Table, 2> ranking_tables(const PlanAnswer& a) {
  const std::vector<Column> layout = {{"ranks"}, {"ZeRO"}, {"micro-batches"}, {"recompute"}, {"schedule"}};
  const Cell peak_rank("peak rank", "GB");
  Table best{.id = "best", .columns = layout, .indent = 2, .fitted = true}, large = best;
  large.id = "too-large";
  best.columns.insert(best.columns.begin(), {"#"});
  for (const Cell& head : {Cell("s/step"), Cell("tokens/s"), Cell("MFU"), Cell("bubble"), peak_rank})
    best.columns.push_back({head, true});
  for (const Cell& head : {peak_rank, Cell("excess"), Cell("mainly for")}) large.columns.push_back({head, true});
  for (const Candidate& c : a.found.best) {
    const planner::Prediction& p = c.prediction;
    Row& row = best.rows.emplace_back(Row{make_cells(c.layout)});
    row.cells.insert(row.cells.begin(), std::to_string(best.rows.size()));
    const Cell tokens(report::grouped(static_cast<int64_t>(p.tokens_per_s)), fmt::format("{:.0f}", p.tokens_per_s));
    row.cells.insert(row.cells.end(),
                     {step_text(p), tokens, report::percent(p.mfu), report::percent(p.bubble), peak_cell(a, c)});
  }
  for (const Candidate& c : a.found.too_large) {
    Row& row = large.rows.emplace_back(Row{make_cells(c.layout)});
    row.cells.insert(row.cells.end(), {peak_cell(a, c), memory_cell(c.prediction.over_bytes), c.prediction.largest});
  }
  large.title = "Does not fit " + report::short_bytes(a.asked.memory());
  return {best, large};
}

Part head_part(const PlanAnswer& a) {
  Part out{.id = "plan", .title = "Plan for " + a.asked.model, .about = {request_text(a.asked)}};
  if (!a.fits()) {
    out.warning = "No plan fits the memory.";
    return out;
  }
  const planner::Recommendation& r = a.recommended;
  out.more = "<h2>Recommended: " + escaped(to_text(r.plan.layout.plan)) + "</h2>\n" + list_html(r.why) +
             "<p>Weakest assumption: " + escaped(r.weakest_assumption) +
             "</p>\n<pre id=\"command\" style=\"white-space: pre-wrap\">" + escaped(a.command) + "</pre>\n";
  return out;
}

Part ranking_part(const PlanAnswer& a) {
  Part out{.id = "ranking",
           .title = "Best plans",
           .caption =
               "Fastest first. Micro-batches: number per step x sequences in each. ~: estimated by a formula; a "
               "dry run would be exact."};
  const auto [best, large] = ranking_tables(a);
  out.tables = {best};
  if (!large.rows.empty()) out.tables.push_back(large);
  return out;
}

constexpr size_t kMaxDrawn = 6000;

std::string time_text(double seconds) { return short_time(1e3 * seconds); }

// Labels lanes with pipeline ranks, skipping labels that would overlap.
void set_ranks(Lanes& lanes, double min_height, double max_height, double all) {
  const size_t ranks = lanes.lanes.size();
  lanes.left = 56, lanes.tall = std::clamp(all / static_cast<double>(ranks), min_height, max_height);
  lanes.ticks = std::max(3.0, (lanes.width - lanes.left - lanes.right) / 110);
  if (lanes.tall <= 11) lanes.named = static_cast<size_t>(std::ceil(14 / lanes.tall));
  for (size_t i = 0; i < ranks; ++i) lanes.lanes[i].name = fmt::format("pp {}", i);
}

Part memory_part(const planner::Prediction& p, double limit, double width) {
  const MemoryParts& peak_rank = p.memory[p.peak_rank];
  const bool several = p.memory.size() > 1;
  Part out{.id = "memory", .title = "Memory"};
  out.caption = fmt::format("{} at its peak; the vertical line is the device memory. The peak rank{}: ",
                            several ? "Each bar is the memory of one pipeline rank" : "The bar is the memory of a rank",
                            several ? fmt::format(" is pipeline rank {}", p.peak_rank) : "");
  Lanes bars{.title = "",
             .lanes = std::vector<Lane>(p.memory.size()),
             .max = 1.04 * std::max(limit, peak_rank.peak()),
             .width = width,
             .right = 70,
             .gap = 3,
             .axis = short_bytes,
             .limit = limit,
             .limit_label = "limit " + short_bytes(limit)};
  set_ranks(bars, 9, 30, 300);
  for (const LegendEntry& e : memory_legend()) {
    const auto named = [](const auto& part) { return std::string_view(part.first); };
    double MemoryParts::*const bytes = std::ranges::find(planner::kMemoryParts, e.text, named)->second;
    if (std::ranges::none_of(p.memory, [&](const MemoryParts& m) { return m.*bytes > 0; })) continue;
    out.caption += fmt::format("{}{} {}", out.legend.empty() ? "" : ", ", e.text, short_bytes(peak_rank.*bytes));
    out.legend.push_back(e);
    for (size_t i = 0; i < p.memory.size(); ++i)
      stack(bars.lanes[i], p.memory[i].*bytes, e.css + " pass",
            fmt::format("pipeline rank {}: {} {}", i, e.text, short_bytes(p.memory[i].*bytes)));
  }
  out.caption += ".";
  for (size_t i = 0; i < p.memory.size(); ++i) {
    bars.lanes[i].suffix = short_bytes(p.memory[i].peak());
    if (p.memory[i].peak() > limit) bars.lanes[i].suffix_css = "bad";
  }
  out.pictures = {render_lanes(bars)};
  return out;
}

Part pipeline_part(const planner::Case& c, const planner::Prediction& p, double width) {
  Simulation s = simulate(make_schedule(c.layout.plan), {.stages = p.stages, .message = p.message_s});
  const double bubble = s.bubble_fraction(), makespan = s.makespan;
  std::vector<double> starts;
  for (const auto& rank : s.actions)
    for (const TimedAction& a : rank) starts.push_back(a.start);
  std::ranges::sort(starts);
  Part out{.id = "pipeline", .title = "Pipeline", .legend = pass_legend(s.schedule)};
  out.legend.push_back({"idle", "idle"});
  out.caption =
      "Each row is a pipeline rank, time runs to the right, and each box is a pass of one micro-batch, labelled with "
      "its number";
  if (s.schedule.chunks() > 1) out.caption += "; paler boxes belong to a rank's later stages";
  out.caption +=
      s.actions.size() == 1
          ? "; a single rank has no bubble."
          : fmt::format("; empty space is the bubble: {} of the time, averaged over ranks.", percent(bubble));
  if (starts.size() > kMaxDrawn) {
    const double end = starts[kMaxDrawn];
    for (auto& rank : s.actions) {
      std::erase_if(rank, [&](const TimedAction& a) { return a.start >= end; });
      for (TimedAction& a : rank) a.end = std::min(a.end, end);
    }
    s.sum_up();
    out.caption += fmt::format(" The figure shows the first {} of {}.", time_text(end), time_text(makespan));
  }
  Lanes lanes = panel_lanes({s, "", std::max(s.makespan, 1e-300), time_text, time_text}, width);
  lanes.right = 24, lanes.gap = 2;
  set_ranks(lanes, 8, 34, 380);
  out.pictures = {render_lanes(lanes)};
  return out;
}

Lanes bar_lanes(double width) { return {.title = "", .max = 0, .width = width, .left = 128, .right = 118, .gap = 7}; }
void add_bar(Lanes& to, const std::string& name, double value, const std::string& css, const std::string& note) {
  if (!(value > 0)) return;
  Lane& bar = to.lanes.emplace_back(Lane{.name = name, .suffix = note});
  stack(bar, value, css, name + ": " + note);
  to.max = std::max(to.max, value);
}

Part time_part(const planner::Prediction& p, double width) {
  Lanes bars = bar_lanes(width);
  const planner::Parts& t = p.parts;
  const auto part = [&](const char* name, double s, const std::string& css) {
    add_bar(bars, name, s, css, fmt::format("{}, {}", time_text(s), percent(s / p.step_s)));
  };
  part("matmuls", t.compute, "k-F"), part("recomputation", t.recompute, "k-F"), part("update", t.optimizer, "k-F");
  part("bubble", t.bubble, "k-fin"), part("tp exposed", t.tp, "a-tp"), part("cp exposed", t.cp, "a-cp");
  part("ep exposed", t.ep, "a-world"), part("dp exposed", t.dp, "a-dp");
  return {.id = "time",
          .title = "Time of a step",
          .caption =
              "Time of the slowest rank: computation, pipeline bubble, and exposed communication, which does not "
              "overlap with computation.",
          .pictures = {render_lanes(bars)}};
}

Part bytes_part(const planner::Prediction& p, double width) {
  Lanes bars = bar_lanes(width);
  double max_bytes = 0;
  for (const auto& [axis, operations] : p.bytes)
    for (const auto& [operation, bytes] : operations) max_bytes = std::max(max_bytes, bytes);
  for (const auto& [axis, operations] : p.bytes)
    for (const auto& [operation, bytes] : operations) {
      if (bytes * kMaxBarRatio < max_bytes) continue;
      std::string name = fmt::format("{} {}", axis, operation);
      std::ranges::replace(name, '_', '-');
      add_bar(bars, name, bytes, css_of_axis(axis), short_bytes(bytes));
    }
  return {.id = "bytes",
          .title = "Bytes sent",
          .caption = bars.lanes.empty() ? "A single rank sends nothing."
                                        : "Average traffic of a rank in a step, by axis and operation; the time figure "
                                          "shows how much of it is exposed.",
          .pictures = {render_lanes(bars)}};
}

Part instead_part(const PlanAnswer& a) {
  Table table{.id = "others", .columns = {{"plan"}, {"compared with the recommended plan"}}};
  for (const planner::WhyNot& w : a.recommended.why_not) table.rows.push_back({{to_text(w.layout.plan), w.because}});
  return {.id = "instead", .title = "Alternatives", .tables = {table}};
}

}  // namespace

std::vector<Part> make_figures(const planner::Case& c, const planner::Prediction& p, double wide, double narrow) {
  return {memory_part(p, c.hardware.usable_bytes(), wide), pipeline_part(c, p, wide), time_part(p, narrow),
          bytes_part(p, narrow)};
}

std::string plan_page(const PlanAnswer& a) {
  std::vector<Part> parts = {head_part(a), ranking_part(a)};
  if (a.fits() || !a.found.too_large.empty()) {
    const Candidate& c = a.fits() ? a.recommended.plan : a.found.too_large.front();
    for (Part& figure : make_figures(make_case(a.asked.question, c.layout), c.prediction, kWidth, kWidth))
      if (figure.id != "pipeline" || c.layout.plan.pp > 1) parts.push_back(std::move(figure));
  }
  if (a.fits()) parts.push_back(instead_part(a));
  return html_page(a.asked.model + ", Tessera plan", parts);
}

std::string plan_text(const PlanAnswer& a) {
  std::string out = request_text(a.asked) + "\n";
  auto [best, large] = ranking_tables(a);
  const bool rough = std::ranges::any_of(best.rows, [](const Row& r) { return r.cells.back().text[0] == '~'; });
  if (a.fits())
    out += as_text(best) +
           fmt::format("  micro-batches: number per step x sequences in each; GB: memory of the peak rank{}\n\n",
                       rough ? ", ~ estimated by a formula" : "");
  large.rows.resize(std::min(large.rows.size(), kMaxTooLarge));
  if (!large.rows.empty()) out += fmt::format("Does not fit {:.1f} GB:\n{}\n", a.asked.memory() / 1e9, as_text(large));
  if (!a.fits()) return out;
  const planner::Recommendation& r = a.recommended;
  out += fmt::format("Recommended, number 1: {}\n", to_text(r.plan.layout.plan));
  for (const std::string& why : r.why) out += "  - " + why + "\n";
  out += "Alternatives:\n";
  for (size_t i = 0; i < std::min(kMaxAlternatives, r.why_not.size()); ++i)
    out += fmt::format("  - {}: {}\n", difference(r.why_not[i].layout.plan, r.plan.layout.plan), r.why_not[i].because);
  out += fmt::format("Weakest assumption: {}\n", r.weakest_assumption);
  out += "\nCommand:\n  " + a.command + "\n";
  for (const MeasuredPlan& plan : a.measured) out += "\n" + as_text(measured_table(plan));
  return out;
}

std::string plan_json_lines(const PlanAnswer& a) {
  const planner::SearchRequest& q = a.asked.question;
  std::string out;
  for (const auto* list : {&a.found.best, &a.found.too_large})
    for (const Candidate& c : *list) {
      nlohmann::ordered_json line = to_json(make_case(q, c.layout), c.prediction);
      line["plan"] = layout_json(c.layout);
      line["memory_by"] = c.described ? "formula" : "dry run";
      out += line.dump() + "\n";
    }
  for (const MeasuredPlan& plan : a.measured) {
    const nlohmann::ordered_json line = {{"event", "measured"},
                                         {"number", plan.number},
                                         {"parts", to_json(measured_table(plan))},
                                         {"plan", layout_json(plan.layout)}};
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

std::string train_command(const PlanOptions& o, const planner::SearchRequest& q, const planner::Layout& l) {
  const int64_t node = q.hardware.ranks_per_node;
  const bool gpu = q.hardware.cores == 0, one_node = q.ranks <= node || node <= 0;
  std::string out = one_node ? "" : fmt::format("mpirun -n {} --npernode {} ", q.ranks, node);
  out += "tessera train" + (o.model_file ? model_args(q.model) : model_args(o));
  out += fmt::format(" --dtype {} --batch {}", value_name(o.run.optim.dtype), q.batch);
  if (one_node) out += fmt::format(" --ranks {}", q.ranks);
  out += layout_args(l);
  if (l.ep > 1) out += fmt::format(" --dp {} --ep {}", l.plan.dp, l.ep);
  if (!gpu) return out;
  return out + (q.ranks > 1 ? " --device cuda --backend nccl --all-reduce native" : " --device cuda");
}

}  // namespace tessera
