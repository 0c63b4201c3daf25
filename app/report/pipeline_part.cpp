// The grid of a pipeline: two plans and what happened.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "app/report/parts.h"
#include "app/report/svg.h"

namespace tessera::report {
namespace {

constexpr double kRow = 26, kGap = 4, kAxis = 22;

std::string time_words(double time, bool in_ms) { return in_ms ? short_time(time) : fmt::format("{} units", time); }

std::string cell(const Panel& panel, const TimedAction& t, size_t rank, double y) {
  const double pixel = (panel.width - kGutter) / panel.scale;
  const Box at{kGutter + t.start * pixel, y, (t.end - t.start) * pixel, kRow - kGap};
  const Schedule& s = panel.sim.schedule;
  const std::string tip =
      fmt::format("{} | rank {}, stage {}, micro-batch {} | from {} for {}", t.action.str(), rank, t.action.stage,
                  t.action.microbatch, time_words(t.start, panel.in_ms), time_words(t.end - t.start, panel.in_ms));
  if (t.action.is_message()) {
    const bool waits = t.action.what == Do::recv_forward || t.action.what == Do::recv_backward;
    if (!waits || t.end <= t.start) return "";
    return box({at.x, at.y + at.height - 4, at.width, 4}, "wait", tip);
  }
  const int chunk = s.chunks() > 1 ? t.action.stage * 3 / s.stages : 0;  // later stages of a rank are paler
  return box(at, fmt::format("k-{} pass c{}", name_of(t.action.what), chunk), tip,
             {fmt::format("{}{}", name_of(t.action.what), t.action.microbatch), fmt::format("{}", t.action.microbatch)},
             fmt::format(" data-mb=\"{}\"", t.action.microbatch));
}

std::string row(const std::string& what, const std::string& share, const std::string& why) {
  return fmt::format("<tr><td>{}</td><td class=\"n\">{}</td><td>{}</td></tr>\n", what, share, why);
}

std::string bubble_table(const Record& r, const MeasuredPipeline& p) {
  std::string out =
      "<table id=\"bubble\"><thead><tr><th>bubble</th><th class=\"n\">share of the time</th><th>how it is "
      "found</th></tr></thead>\n<tbody>\n";
  out += row("formula", p.formula ? percent(*p.formula) : "none known",
             "the closed form of the schedule, if forward, input and weight gradients take equally long");
  out += row("planned, equal times", percent(p.equal.bubble_share()),
             "the schedule on a simulated clock, with the same assumption");
  out += row("planned, measured times", percent(p.replayed.bubble_share()),
             r.shared ? "the schedule on the same clock: each pass for as long as it had a processor in this step; "
                        "messages take no time"
                      : "the schedule on the same clock: each pass for as long as it took in this step, and messages "
                        "for as long as they took on average");
  if (r.shared)
    out += row("measured", "not meaningful here",
               fmt::format("null: {} threads of ranks share {} cores, so a rank that computes slows the others down, "
                           "and what it waited for is not the plan's bubble",
                           r.threads, r.cores));
  else
    out += row("measured", percent(p.measured.bubble_share()),
               "the time in which ranks did not compute, from the first pass of the step to the last");
  return out + "</tbody></table>\n";
}

std::string times_table(const Record& r, const MeasuredPipeline& p) {
  const bool split = p.measured.schedule.has(Do::I);
  std::string out =
      fmt::format("<table><thead><tr><th>mean times</th><th class=\"n\">forward</th>{}</tr></thead>\n<tbody>\n",
                  split ? "<th class=\"n\">input gradient</th><th class=\"n\">weight gradient</th>"
                        : "<th class=\"n\">backward</th>");
  for (size_t s = 0; s < p.times.stages.size(); ++s) {
    const StageTimes& t = p.times.stages[s];
    out += fmt::format("<tr><td>stage {}</td><td class=\"n\">{}</td>", s, short_time(t.forward));
    for (const double x : split ? std::vector<double>{t.input, t.weight} : std::vector<double>{t.backward})
      out += fmt::format("<td class=\"n\">{}</td>", short_time(x));
    out += "</tr>\n";
  }
  out += "</tbody></table>\n";
  if (r.shared) return out + "<p class=\"note\">Times for which passes had a processor.</p>\n";
  return out + fmt::format("<p class=\"note\">A message takes {} from when both sides are ready.</p>\n",
                           short_time(p.times.message));
}

}  // namespace

Picture panel_picture(const Panel& p) {
  const double rows = static_cast<double>(p.sim.actions.size()) * kRow, pixel = (p.width - kGutter) / p.scale;
  Picture out{.title = p.title, .width = p.width, .height = rows + kAxis};
  for (size_t r = 0; r < p.sim.actions.size(); ++r) {
    const double y = static_cast<double>(r) * kRow;
    out.body += text_at(kGutter - 8, y + 16, "end", fmt::format("pipeline rank {}", r));
    out.body += box({kGutter, y, p.sim.makespan * pixel, kRow - kGap}, "idle",
                    fmt::format("idle | rank {} is idle for {} of {}", r, time_words(p.sim.idle[r], p.in_ms),
                                time_words(p.sim.makespan, p.in_ms)));
    for (const TimedAction& t : p.sim.actions[r]) out.body += cell(p, t, r, y);
  }
  out.body += time_axis({.width = p.width, .y = rows + 14, .span = p.scale, .in_ms = p.in_ms});
  return out;
}

std::string panel_svg(const Panel& panel) {
  return fmt::format("<h3>{}</h3>\n", escaped(panel.title)) + inline_svg(panel_picture(panel));
}

std::vector<LegendEntry> pass_legend(const Schedule& s) {
  std::vector<LegendEntry> out = {{"k-F", "F: forward"}};
  if (s.has(Do::B)) out.push_back({"k-B", "B: backward"});
  if (s.has(Do::I)) out.push_back({"k-I", "I: gradient of the input"});
  if (s.has(Do::W)) out.push_back({"k-W", "W: gradient of the weights"});
  return out;
}

std::vector<Panel> panels_of(const Record& r, const MeasuredPipeline& p, const StepSpan& step) {
  const double ms = std::max({p.replayed.makespan, r.shared ? 0 : p.measured.makespan, 1e-9});
  std::vector<Panel> out = {{p.equal, "Planned, equal times", p.equal.makespan, false},
                            {p.replayed, "Planned, measured times", ms, true}};
  if (!r.shared) out.push_back({p.measured, fmt::format("Measured, step {}", step.step), ms, true});
  return out;
}

std::string pipeline_part(const Record& r, const MeasuredPipeline& p, const StepSpan& step) {
  const Schedule& s = r.schedule;
  std::string out = fmt::format(
      "<section id=\"pipeline\">\n<h2>Pipeline: {}, planned and measured</h2>\n<p>Each row is a rank, time runs to the "
      "right, and the number on a box is its micro-batch. Empty space is time in which a rank waits: the bubble. The "
      "first picture is the schedule as it is taught. In the second its boxes have the measured lengths{}.</p>\n",
      escaped(s.name),
      r.shared
          ? std::string()
          : fmt::format(". The third is step {} as it happened, with a thin line where a rank waited for a message",
                        step.step));
  std::vector<LegendEntry> entries = pass_legend(s);
  entries.push_back({"idle", "idle"});
  if (!r.shared) entries.push_back({"wait", "waiting for a message"});
  out += legend(entries);
  if (s.chunks() > 1) out += "<p class=\"note\">Each rank has several stages; later ones are paler.</p>\n";
  if (r.ranks.size() > p.measured.actions.size())
    out += "<p class=\"note\">Of the pipelines that run side by side, the one with rank 0 is drawn.</p>\n";
  for (const Panel& panel : panels_of(r, p, step)) out += panel_svg(panel);
  if (r.shared)
    out += fmt::format(
        "<p class=\"warn\">What happened is not drawn: {} threads of ranks share {} cores and take turns on them, so "
        "what a rank waited for is not the plan's bubble. Above are the times for which single passes had a processor, "
        "replayed on the simulated clock.</p>\n",
        r.threads, r.cores);
  return out + bubble_table(r, p) + times_table(r, p) + "</section>\n";
}

}  // namespace tessera::report
