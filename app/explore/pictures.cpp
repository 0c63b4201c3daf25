// The prediction of a plan and the ranking of others as HTML and SVG, for the page.
#include "app/explore/explore.h"
#include "app/report/report.h"
#include "planner/case_json.h"

namespace tessera::explore {
namespace {

using planner::Candidate;
using planner::Layout;
using planner::MemoryParts;
using planner::Prediction;
using report::escaped;
using report::Lane;
using report::Lanes;
using report::LegendEntry;

constexpr size_t kMostDrawn = 6000;  // actions

struct Category {
  const char *css, *name;
  double MemoryParts::*bytes;
  const char* hint;
};
constexpr std::array<Category, 6> kCategories = {
    {{"parameters", "parameters", &MemoryParts::parameters,
      "More pipeline or tensor ranks, or ZeRO-3, share them out."},
     {"gradients", "gradients", &MemoryParts::gradients, "More pipeline or tensor ranks, or ZeRO-2, share them out."},
     {"optimizer", "optimizer's state", &MemoryParts::optimizer,
      "ZeRO-1, or more pipeline or tensor ranks, share it out."},
     {"activations", "activations", &MemoryParts::activations,
      "Fewer sequences in a micro-batch, more tensor ranks with sequence parallel, or recomputation need less."},
     {"communication", "buffers of communication", &MemoryParts::communication,
      "Fewer ranks along the axes that gather need less."},
     {"workspace", "workspace", &MemoryParts::workspace, "Fewer sequences in a micro-batch need less."}}};

const Category& category(const std::string& name) {
  return *std::ranges::find_if(kCategories, [&](const Category& c) { return c.css == name; });
}

// Halves are rounded up.
std::string fixed(double x, int digits) { return fmt::format("{:.{}f}", std::nextafter(x, 1e300), digits); }
std::string three(double x) { return fixed(x, x >= 99.95 ? 0 : x >= 9.995 ? 1 : 2); }
std::string scaled(double x, const std::vector<std::pair<double, const char*>>& units) {
  if (!(std::abs(x) > 0)) return "0";
  auto unit = std::ranges::find_if(units, [&](const auto& u) { return std::abs(x) >= 0.9995 * u.first; });
  if (unit == units.end()) --unit;
  const std::string out = three(x / unit->first) + " " + unit->second;
  return out.substr(0, out.find_last_not_of(' ') + 1);
}
std::string seconds(double x) { return scaled(x, {{1, "s"}, {1e-3, "ms"}, {1e-6, "µs"}}); }
std::string count(double x) { return scaled(x, {{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "K"}, {1, ""}}); }
std::string percent(double x) { return fixed(100 * x, std::abs(x) < 0.0995 ? 1 : 0) + "%"; }

// A figure's sentence and picture, whose legend stands above it.
struct Drawn {
  std::string sentence;
  std::vector<LegendEntry> legend = {};
  Lanes lanes;
  double above = 0;  // room between the legend and the lanes
};

// Names lanes as pipeline ranks, as far as their height gives room.
void set_ranks(Lanes& lanes, double least, double most, double all) {
  const size_t ranks = lanes.lanes.size();
  lanes.left = 56, lanes.tall = std::clamp(all / static_cast<double>(ranks), least, most);
  if (lanes.tall <= 11) lanes.named = static_cast<size_t>(std::ceil(14 / lanes.tall));
  for (size_t i = 0; i < ranks; ++i) lanes.lanes[i].name = fmt::format("pp {}", i);
}

Drawn memory(const Prediction& p, double limit) {
  const MemoryParts& fullest = p.memory[p.fullest];
  const bool several = p.memory.size() > 1;
  Drawn out{.sentence = several ? "Each bar is what a rank of one pipeline rank holds at its fullest moment"
                                : "The bar is what a rank holds at its fullest moment",
            .lanes = {.title = "", .lanes = std::vector<Lane>(p.memory.size())},
            .above = 20};
  set_ranks(out.lanes, 9, 30, 300);
  out.sentence += fmt::format("; the broken line is what its card has. The fullest{}: ",
                              several ? fmt::format(" is pipeline rank {}", p.fullest) : "");
  for (const Category& c : kCategories) {
    if (std::ranges::none_of(p.memory, [&](const MemoryParts& m) { return m.*c.bytes > 0; })) continue;
    out.sentence += fmt::format("{}{} {}", out.legend.empty() ? "" : ", ", c.name, bytes_words(fullest.*c.bytes));
    out.legend.push_back({c.css, c.name});
    for (size_t i = 0; i < p.memory.size(); ++i)
      stack(out.lanes.lanes[i], p.memory[i].*c.bytes, std::string(c.css) + " pass",
            fmt::format("pipeline rank {}: {} {}", i, c.name, bytes_words(p.memory[i].*c.bytes)));
  }
  out.sentence += ".";
  for (size_t i = 0; i < p.memory.size(); ++i) {
    out.lanes.lanes[i].behind = bytes_words(p.memory[i].peak());
    if (p.memory[i].peak() > limit) out.lanes.lanes[i].behind_css = "bad";
  }
  out.lanes.most = 1.04 * std::max(limit, fullest.peak());
  out.lanes.right = 70, out.lanes.gap = 3, out.lanes.axis = bytes_words;
  out.lanes.limit = limit, out.lanes.limit_words = "the card: " + bytes_words(limit);
  return out;
}

// The pipeline's passes; of a long one those that begin first.
Drawn pipeline(const planner::Case& c, const Prediction& p, double width) {
  Simulation s = simulate(schedule_of(c.layout.plan), {.stages = p.stages, .message = p.message_s});
  const double bubble = s.bubble_share(), makespan = s.makespan;
  std::vector<double> starts;
  for (const auto& rank : s.actions)
    for (const TimedAction& a : rank) starts.push_back(a.start);
  std::ranges::sort(starts);
  std::string sentence =
      "Each row is a pipeline rank and time goes to the right; a box is a pass of one micro-batch, with its number";
  if (s.schedule.chunks() > 1) sentence += ", fainter for a rank's later stages";
  sentence += s.actions.size() == 1
                  ? "; one rank never waits for another."
                  : fmt::format("; empty space is the bubble: {} of the time of all ranks.", percent(bubble));
  if (starts.size() > kMostDrawn) {
    const double end = starts[kMostDrawn];
    for (auto& rank : s.actions) {
      std::erase_if(rank, [&](const TimedAction& a) { return a.start >= end; });
      for (TimedAction& a : rank) a.end = std::min(a.end, end);
    }
    s.sum_up();
    sentence += fmt::format(" The picture shows the first {} of {}.", seconds(end), seconds(makespan));
  }
  const double most = std::max(s.makespan, 1e-300);
  Drawn out{sentence, report::pass_legend(s.schedule), report::lanes_of({s, "", most, seconds, seconds}, width), 4};
  out.legend.push_back({"idle", "waiting"});
  set_ranks(out.lanes, 8, 34, 380);
  out.lanes.right = 24, out.lanes.gap = 2;
  return out;
}

// Bars under each other, each with a name, a value and a colour.
void add_bar(Drawn& to, const std::string& name, double value, const char* css, const std::string& note) {
  if (!(value > 0)) return;
  Lane bar{.name = name, .behind = note};
  stack(bar, value, css, name + ": " + note);
  to.lanes.most = to.lanes.lanes.empty() ? value : std::max(to.lanes.most, value);
  to.lanes.lanes.push_back(std::move(bar));
}

Drawn time(const Prediction& p) {
  Drawn out{.sentence =
                "Where the slowest rank's step goes: blue computes, grey is this rank's own bubble, purple waits for "
                "what other ranks send, as far as nothing is computed meanwhile.",
            .lanes = {.title = "", .left = 128, .right = 118, .gap = 7}};
  const planner::Parts& t = p.parts;
  const auto part = [&](const char* name, double s, const char* css) {
    add_bar(out, name, s, css, fmt::format("{}, {}", seconds(s), percent(s / p.step_s)));
  };
  part("products", t.compute, "compute"), part("recomputation", t.recompute, "compute");
  part("update", t.optimizer, "compute"), part("its bubble", t.bubble, "waiting");
  part("tp exposed", t.tp, "sending"), part("cp exposed", t.cp, "sending");
  part("ep exposed", t.ep, "sending"), part("dp exposed", t.dp, "sending");
  return out;
}

Drawn sent(const Prediction& p) {
  Drawn out{.sentence =
                "What a rank sends in a step on average, by the axis and the operation; the picture of time says how "
                "much of it is waited for.",
            .lanes = {.title = "", .left = 128, .right = 118, .gap = 7}};
  double most = 0;
  for (const auto& [axis, operations] : p.bytes)
    for (const auto& [operation, bytes] : operations) most = std::max(most, bytes);
  for (const auto& [axis, operations] : p.bytes)
    for (auto [operation, bytes] : operations) {
      if (bytes * report::kSeenBytes < most) continue;
      std::string name = fmt::format("{} {}", axis, operation);
      std::ranges::replace(name, '_', '-');
      add_bar(out, name, bytes, "sending", bytes_words(bytes));
    }
  if (out.lanes.lanes.empty()) out.sentence = "One rank alone sends nothing.";
  return out;
}

nlohmann::ordered_json shown(const char* title, Drawn d, double width) {
  double y = 0;
  const std::string legend = report::legend_svg(d.legend, 0, width, y);
  y += d.above;
  d.lanes.width = width;
  d.lanes.ticks = std::max(3.0, (width - d.lanes.left - d.lanes.right) / 110);
  const report::Picture p = drawn(d.lanes);
  return {{"sentence", d.sentence},
          {"svg",
           fmt::format("<svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" aria-label=\"{}. {}\">\n{}<g "
                       "transform=\"translate(0 {:.0f})\">\n{}</g></svg>",
                       width, y + p.height + 4, title, escaped(d.sentence), legend, y, report::with_titles(p.body))}};
}

std::string verdict(const Prediction& p) {
  const MemoryParts& fullest = p.memory[p.fullest];
  std::string line, why;
  if (p.fits) {
    line = fmt::format("It fits, and a step takes {}.", seconds(p.step_s));
    if (p.slowest_s > p.fastest_s)
      why = fmt::format("The numbers are those of data sheets: real runs take from {} to {}.", seconds(p.fastest_s),
                        seconds(p.slowest_s));
  } else {
    const Category& largest = category(p.largest);
    line = fmt::format("It does not fit: a rank needs {}, {} more than it has.", bytes_words(fullest.peak()),
                       bytes_words(p.over_bytes));
    if (p.memory.size() > 1) why = fmt::format("Pipeline rank {} is the fullest. ", p.fullest);
    why += fmt::format("Most of it: {}, {}. {}", largest.name, bytes_words(fullest.*largest.bytes), largest.hint);
  }
  return fmt::format("<h2 id=\"verdict-line\">{}</h2><p id=\"verdict-why\">{}</p><div id=\"figures\">", line, why) +
         report::as_html({{"step", seconds(p.step_s)},
                          {"tokens/s", count(p.tokens_per_s)},
                          {"share of peak", percent(p.mfu)},
                          {"TFLOP/s each", three(p.tflops_per_rank)},
                          {"bubble, all ranks", percent(p.bubble)},
                          {"fullest rank", bytes_words(fullest.peak())}}) +
         "</div>";
}

std::string plan_words(const Layout& l) {
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
    out += fmt::format("{}{}, ", text_of(p.schedule), chunks > 1 ? fmt::format(" x {}", chunks) : "");
  }
  out += fmt::format("{} micro-batch{} of {}", p.microbatches, p.microbatches > 1 ? "es" : "", l.sequences);
  return p.recompute == Recompute::none ? out : fmt::format("{}, recompute {}", out, text_of(p.recompute));
}

// The controls' values of a plan, as they stand in a link.
std::string link_of(const Layout& l) {
  const nlohmann::ordered_json plan = planner::to_json(l);
  std::string out;
  for (const char* key : {"pp", "tp", "cp", "ep", "sequences", "schedule", "chunks", "zero", "recompute", "sp"}) {
    std::string value = plan[key].is_string() ? plan[key].get<std::string>() : plan[key].dump();
    if (const size_t plus = value.find('+'); plus != std::string::npos) value.replace(plus, 1, "%2B");
    out += fmt::format("{}{}={}", out.empty() ? "" : "&amp;", key, value);
  }
  return out;
}

report::Row row_of(const Candidate& c) {
  const Prediction& p = c.prediction;
  report::Row row{{"", seconds(p.step_s), bytes_words(p.memory[p.fullest].peak()), percent(p.mfu)},
                  p.fits ? "" : "over"};
  row.cells[0].html =
      fmt::format("<button type=\"button\" data-plan=\"{0}\" aria-label=\"Show the plan {1}\">{1}</button>",
                  link_of(c.layout), plan_words(c.layout));
  if (!p.fits)
    row.cells[0].html += fmt::format("<div>does not fit: {} too much, mostly {}</div>", bytes_words(p.over_bytes),
                                     category(p.largest).name);
  return row;
}

}  // namespace

std::string bytes_words(double x) { return scaled(x, {{1e12, "TB"}, {1e9, "GB"}, {1e6, "MB"}, {1e3, "KB"}, {1, "B"}}); }

nlohmann::ordered_json drawn_prediction(const planner::Case& c, const Prediction& p, const Widths& widths) {
  return {{"verdict", verdict(p)},
          {"memory", shown("Memory", memory(p, c.hardware.memory_bytes - c.hardware.reserved_bytes), widths.wide)},
          {"pipeline", shown("Pipeline", pipeline(c, p, widths.wide), widths.wide)},
          {"time", shown("Time of a step", time(p), widths.narrow)},
          {"bytes", shown("Bytes sent", sent(p), widths.narrow)}};
}

std::string drawn_ranking(const PlanAnswer& a) {
  report::Table table{.id = "plans", .columns = {{"plan"}, {"step", true}, {"memory", true}, {"of peak", true}}};
  for (const Candidate& c : a.found.best) table.rows.push_back(row_of(c));
  for (size_t i = 0; i < std::min<size_t>(a.fits() ? 3 : 10, a.found.too_large.size()); ++i)
    table.rows.push_back(row_of(a.found.too_large[i]));
  const std::string line =
      a.fits() ? fmt::format("Of all ways to divide {} ranks, the fastest that fit. Choose one to see it.",
                             a.asked.question.ranks)
               : "No plan fits. Nearest to fitting:";
  std::string out = fmt::format("<p id=\"ranking-line\">{}</p>{}<div id=\"advice\">", line, as_html(table));
  const auto list = [&](const char* title, const std::vector<std::string>& lines) {
    if (!lines.empty()) out += fmt::format("<h3>{}</h3>{}", title, report::list_html(lines));
  };
  if (a.fits()) {
    const planner::Recommendation& r = a.recommended;
    std::vector<std::string> instead;
    for (const planner::WhyNot& w : r.why_not) instead.push_back(plan_words(w.layout) + ": " + w.because);
    list("Why the first", r.why), list("Why not another", instead);
    if (!r.weakest_assumption.empty()) list("What would turn it", {r.weakest_assumption});
    if (!a.command.empty()) out += fmt::format("<h3>The command</h3><code>{}</code>", escaped(a.command));
  }
  return out + "</div>";
}

}  // namespace tessera::explore
