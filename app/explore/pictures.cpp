// HTML and SVG of a prediction and a ranking.
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "app/explore/explore.h"
#include "app/output.h"
#include "planner/case_json.h"

namespace tessera::explore {
namespace {

using planner::Candidate;
using planner::Layout;
using planner::Prediction;
using report::escaped;
using report::percent;
using report::short_bytes;

// How to reduce each category of memory.
const std::map<std::string_view, const char*> kHints = {
    {"parameters", "Use more pipeline or tensor ranks, or ZeRO-3, to shard them."},
    {"gradients", "Use more pipeline or tensor ranks, or ZeRO-2, to shard them."},
    {"optimizer", "Use ZeRO-1, or more pipeline or tensor ranks, to shard it."},
    {"activations",
     "Use fewer sequences per micro-batch, more tensor ranks with sequence parallelism, or recomputation."},
    {"communication", "Use fewer ranks along the axes that gather tensors."},
    {"workspace", "Use fewer sequences per micro-batch."}};

std::string seconds(double x) { return report::short_time(1e3 * x); }

nlohmann::ordered_json shown(const report::Part& figure) {
  const report::Picture& p = figure.pictures[0];
  double y = 0;
  const std::string legend = report::legend_svg(figure.legend, 0, p.width, y);
  return {{"sentence", figure.caption},
          {"svg", fmt::format("<svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" aria-label=\"{}. {}\">\n{}<g "
                              "transform=\"translate(0 {:.0f})\">\n{}</g></svg>",
                              p.width, y + p.height + 4, figure.title, escaped(figure.caption), legend, y,
                              report::with_titles(p.body))}};
}

std::string verdict(const Prediction& p) {
  const planner::MemoryParts& peak_rank = p.memory[p.peak_rank];
  std::string line, why;
  if (p.fits) {
    line = fmt::format("The plan fits; step time {}.", seconds(p.step_s));
    if (p.slowest_s > p.fastest_s)
      why = fmt::format("Based on data sheets; the expected range in practice is {} to {}.", seconds(p.fastest_s),
                        seconds(p.slowest_s));
  } else {
    line = fmt::format("The plan does not fit: a rank needs {}, {} more than available.", short_bytes(peak_rank.peak()),
                       short_bytes(p.over_bytes));
    if (p.memory.size() > 1) why = fmt::format("Pipeline rank {} has the highest peak. ", p.peak_rank);
    for (const auto& [name, bytes] : planner::kMemoryParts)
      if (name == p.largest)
        why += fmt::format("Largest category: {}, {}. {}", name, short_bytes(peak_rank.*bytes), kHints.at(name));
  }
  return fmt::format("<h2 id=\"verdict-line\">{}</h2><p id=\"verdict-why\">{}</p><div id=\"figures\">", line, why) +
         report::as_html({{"step", seconds(p.step_s)},
                          {"tokens/s", format_si(p.tokens_per_s)},
                          {"MFU", percent(p.mfu)},
                          {"TFLOP/s per rank", fmt::format("{:.3g}", p.tflops_per_rank)},
                          {"bubble, all ranks", percent(p.bubble)},
                          {"peak rank", short_bytes(peak_rank.peak())}}) +
         "</div>";
}

std::string plan_text(const Layout& l) {
  const Plan& p = l.plan;
  std::string out;
  const std::array<std::pair<const char*, int64_t>, 5> axes = {
      {{"pp", p.pp}, {"dp", p.dp}, {"cp", p.cp}, {"tp", p.tp}, {"ep", l.ep}}};
  for (const auto& [axis, size] : axes)
    if (size > 1) out += fmt::format("{} {}, ", axis, size);
  if (p.sp) out += "sp, ";
  if (p.zero != ZeroStage::none) out += fmt::format("ZeRO-{}, ", static_cast<int>(p.zero));
  if (p.pp > 1) {
    const auto chunks = planner::to_json(l)["chunks"].get<int64_t>();
    out += fmt::format("{}{}, ", value_name(p.schedule), chunks > 1 ? fmt::format(" x {}", chunks) : "");
  }
  out += fmt::format("{} micro-batch{} of {}", p.microbatches, p.microbatches > 1 ? "es" : "", l.sequences);
  return p.recompute == Recompute::none ? out : fmt::format("{}, recompute {}", out, value_name(p.recompute));
}

// The values of a plan's controls as a URL query.
std::string link_query(const Layout& l) {
  const nlohmann::ordered_json plan = planner::to_json(l);
  std::string out;
  for (const char* key : {"pp", "tp", "cp", "ep", "sequences", "schedule", "chunks", "zero", "recompute", "sp"}) {
    std::string value = plan[key].is_string() ? plan[key].get<std::string>() : plan[key].dump();
    if (const size_t plus = value.find('+'); plus != std::string::npos) value.replace(plus, 1, "%2B");
    out += fmt::format("{}{}={}", out.empty() ? "" : "&amp;", key, value);
  }
  return out;
}

report::Row make_row(const Candidate& c) {
  const Prediction& p = c.prediction;
  report::Row row{{"", seconds(p.step_s), short_bytes(p.memory[p.peak_rank].peak()), percent(p.mfu)},
                  p.fits ? "" : "over"};
  row.cells[0].html =
      fmt::format("<button type=\"button\" data-plan=\"{0}\" aria-label=\"Show the plan {1}\">{1}</button>",
                  link_query(c.layout), plan_text(c.layout));
  if (!p.fits)
    row.cells[0].html +=
        fmt::format("<div>does not fit: {} over the limit, mainly {}</div>", short_bytes(p.over_bytes), p.largest);
  return row;
}

}  // namespace

nlohmann::ordered_json render_prediction(const planner::Case& c, const Prediction& p, const Widths& widths) {
  nlohmann::ordered_json out = {{"verdict", verdict(p)}};
  for (const report::Part& figure : make_figures(c, p, widths.wide, widths.narrow)) out[figure.id] = shown(figure);
  return out;
}

std::string render_ranking(const PlanAnswer& a) {
  report::Table table{.id = "plans", .columns = {{"plan"}, {"step", true}, {"memory", true}, {"MFU", true}}};
  for (const Candidate& c : a.found.best) table.rows.push_back(make_row(c));
  for (size_t i = 0; i < std::min<size_t>(a.fits() ? 3 : 10, a.found.too_large.size()); ++i)
    table.rows.push_back(make_row(a.found.too_large[i]));
  const std::string line =
      a.fits() ? fmt::format("The fastest plans that fit, of all layouts of {} ranks. Select one to show it.",
                             a.asked.question.ranks)
               : "No plan fits. Closest plans:";
  std::string out = fmt::format("<p id=\"ranking-line\">{}</p>{}<div id=\"advice\">", line, as_html(table));
  const auto list = [&](const char* title, const std::vector<std::string>& lines) {
    if (!lines.empty()) out += fmt::format("<h3>{}</h3>{}", title, report::list_html(lines));
  };
  if (a.fits()) {
    const planner::Recommendation& r = a.recommended;
    std::vector<std::string> instead;
    for (const planner::WhyNot& w : r.why_not) instead.push_back(plan_text(w.layout) + ": " + w.because);
    list("Why the first plan", r.why), list("Why not a different plan", instead);
    if (!r.weakest_assumption.empty()) list("What could change the result", {r.weakest_assumption});
    if (!a.command.empty()) out += fmt::format("<h3>Command</h3><code>{}</code>", escaped(a.command));
  }
  return out + "</div>";
}

}  // namespace tessera::explore
