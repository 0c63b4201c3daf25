// Figures of runs, with scales shared by several runs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "app/report/report.h"

namespace tessera::report {
namespace {

constexpr double kFigureGap = 16;
constexpr double kMinWaitWidth = 0.3;  // pixels
constexpr const char* kPale = " c1 pass";

using Records = std::vector<Record>;

std::string tick_of_units(double time) { return fmt::format("{:.4g}", time); }
std::string units(double time) { return fmt::format("{} units", time); }

bool is_message(const Event& e) { return e.track == "send" || e.track == "receive"; }

std::string css_class(const Event& e) {
  static const std::map<std::string, const char*> known = {
      {"forward", "k-F"},  {"backward", "k-B"}, {"input gradient", "k-I"}, {"weight gradient", "k-W"},
      {"waiting", "wait"}, {"send", "k-msg"},   {"receive", "k-msg"}};
  if (e.track == "update") return e.name == "optimizer" ? "k-opt" : "k-fin";
  const auto found = known.find(e.track);
  return found == known.end() ? css_of_axis(e.axis) : found->second;
}

std::string event_tooltip(const Event& e, const StepSpan& step) {
  std::string tip = fmt::format("{} | {} | from {} for {}", e.name, e.track, short_time(e.begin - step.begin),
                                short_time(e.end - e.begin));
  if (e.stage >= 0) tip += fmt::format(" | stage {}, micro-batch {}", e.stage, e.microbatch);
  if (!e.operation.empty())
    tip += fmt::format(" | axis {}, an array of {}, {} sent", e.axis, short_bytes(static_cast<double>(e.bytes)),
                       short_bytes(static_cast<double>(e.sent)));
  return tip;
}

// CSS class distinguishing a rank's later stages.
std::string pale(const Schedule& s, int stage) {
  const int chunk = stage < 0 ? 0 : std::min(2, s.chunk(stage));
  return chunk > 0 ? fmt::format(" c{}", chunk) : "";
}

// The first lane shows computation overlaid with stalls; sends and receives share a lane; each axis has a lane.
Picture rank_timeline(const Record& r, const Rank& rank, const StepSpan& step, double span, double width) {
  const Mark idle{0, step.end - step.begin, "idle"};
  std::map<std::string, Lane> others;
  std::vector<Mark> waits;
  Lanes out{.title = rank.name,
            .lanes = {{"computation", {idle}}},
            .max = span,
            .width = width,
            .tall = 20,
            .gap = 3,
            .axis = tick_of_ms};
  for (const Event& e : rank.events) {
    if (e.step != step.step || e.track == "step") continue;
    Mark mark{e.begin - step.begin, e.end - step.begin, css_class(e), event_tooltip(e, step)};
    if (e.track == "waiting") {
      mark.thin = true;
      if ((mark.end - mark.begin) * (width - kGutter) / span > kMinWaitWidth) waits.push_back(std::move(mark));
      continue;
    }
    mark.labels = {e.name, e.stage >= 0 ? fmt::format("{}", e.microbatch) : ""};
    const bool computes = e.operation.empty() && !is_message(e);
    if (computes) mark.css += pale(r.schedule, e.stage);
    const std::string name = is_message(e) ? "messages" : e.track;
    Lane& lane = computes ? out.lanes[0] : others.try_emplace(name, Lane{name, {idle}}).first->second;
    lane.marks.push_back(std::move(mark));
  }
  out.lanes[0].marks.insert(out.lanes[0].marks.end(), waits.begin(), waits.end());
  for (auto& [name, lane] : others) out.lanes.push_back(std::move(lane));
  return render_lanes(out);
}

int64_t total(const MemorySample& h) {
  int64_t sum = 0;
  for (const int64_t b : h.bytes) sum += b;
  return sum;
}

std::vector<MemorySample> span_samples(const Rank& rank, const StepSpan& step) {
  std::vector<MemorySample> out;
  for (const MemorySample& h : rank.memory) {
    if (h.time > step.end) break;
    if (h.time <= step.begin) out.clear();
    out.push_back(h);
  }
  if (out.empty()) return out;
  out.front().time = std::max(out.front().time, step.begin);
  out.push_back(out.back());
  out.back().time = step.end;
  return out;
}

// One category stacked on the previous ones. A sample is valid until the next one.
std::string area(const std::vector<MemorySample>& samples, size_t category, const Chart& chart) {
  std::string upper, lower;
  for (size_t i = 0; i < samples.size(); ++i) {
    double below = 0;
    for (size_t c = 0; c < category; ++c) below += static_cast<double>(samples[i].bytes[c]);
    const double above = below + static_cast<double>(samples[i].bytes[category]);
    const double from = chart.x(samples[i].time), to = i + 1 < samples.size() ? chart.x(samples[i + 1].time) : from;
    upper += fmt::format("{:.1f},{:.1f} {:.1f},{:.1f} ", from, chart.y(above), to, chart.y(above));
    lower.insert(0, fmt::format("{:.1f},{:.1f} {:.1f},{:.1f} ", to, chart.y(below), from, chart.y(below)));
  }
  return fmt::format("<polygon class=\"m{} area\" points=\"{}{}\"/>\n", category, upper, lower);
}

std::string sample_text(const MemorySample& h, const StepSpan& step) {
  std::string out =
      fmt::format("at {} | {} held", short_time(h.time - step.begin), short_bytes(static_cast<double>(total(h))));
  for (size_t c = 0; c < h.bytes.size(); ++c)
    out += fmt::format(" | {} {}", to_string(static_cast<Category>(c)), short_bytes(static_cast<double>(h.bytes[c])));
  return out;
}

// Narrow figures have no tooltips.
Picture rank_memory(const Rank& rank, const StepSpan& step, double max_bytes, double width) {
  const std::vector<MemorySample> samples = span_samples(rank, step);
  const Chart chart{.width = width,
                    .height = 190,
                    .left = 74,
                    .right = 6,
                    .top = 8,
                    .bottom = 24,
                    .first = step.begin,
                    .last = std::max(step.end, step.begin + 1e-9),
                    .high = max_bytes};
  Picture out{.title = rank.name, .width = width, .height = chart.height, .body = chart.grid(short_bytes)};
  for (size_t c = 0; c < kCategories; ++c) out.body += area(samples, c, chart);
  for (size_t i = 0; width > kFigureWidth / 2 && i + 1 < samples.size(); ++i) {
    const double from = chart.x(samples[i].time);
    out.body += render_svg({from, chart.top, chart.x(samples[i + 1].time) - from,
                            chart.height - chart.top - chart.bottom, "glass", sample_text(samples[i], step)});
  }
  out.body += chart.axis(chart.height - 8, tick_of_ms);
  return out;
}

const char* second(size_t run) { return run > 0 ? "2" : ""; }

Picture loss_picture(const Records& runs, double width) {
  Chart chart{.width = width,
              .height = 240,
              .left = 60,
              .right = 10,
              .top = 12,
              .bottom = 30,
              .first = std::numeric_limits<double>::infinity(),
              .last = 0,
              .low = std::numeric_limits<double>::infinity(),
              .high = -std::numeric_limits<double>::infinity()};
  for (const Record& r : runs)
    for (const auto* points : {&r.losses, &r.validations})
      for (const Point& p : *points) {
        chart.low = std::min(chart.low, p.value), chart.high = std::max(chart.high, p.value);
        chart.first = std::min(chart.first, static_cast<double>(p.step));
        chart.last = std::max(chart.last, static_cast<double>(p.step));
      }
  const double margin = std::max(1e-3, (chart.high - chart.low) * 0.06);
  chart.low -= margin, chart.high += margin;
  Picture out{.title = "", .width = width, .height = chart.height};
  out.body = chart.grid([](double tick) { return fmt::format("{:.4g}", tick); });
  const std::vector<double> steps = ticks(chart.first, chart.last, 10);
  chart.last = std::max(chart.last, chart.first + 1);
  for (const double tick : steps)
    if (tick == std::floor(tick))
      out.body += text_at(chart.x(tick), chart.height - 10, "mid", fmt::format("{:.0f}", tick));
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto at = [&](const Point& p) { return std::pair(chart.x(static_cast<double>(p.step)), chart.y(p.value)); };
    out.body += fmt::format("<polyline class=\"loss{}\" points=\"", second(i));
    for (const Point& p : runs[i].losses) out.body += fmt::format("{:.1f},{:.1f} ", at(p).first, at(p).second);
    out.body += "\"/>\n";
    for (const Point& p : runs[i].validations)
      out.body += fmt::format(
          "<circle class=\"val{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" data-tip=\"step {}: validation loss "
          "{:.4f}\"/>\n",
          second(i), at(p).first, at(p).second, p.step, p.value);
  }
  return out;
}

std::string run_title(const Records& runs, const Record& r, const std::string& what) {
  if (runs.size() == 1) return what;
  return what.empty() ? r.label : fmt::format("{}: {}", r.label, what);
}

[[noreturn]] void refuse(std::string_view figure, const Record& r, const std::string& what) {
  bad_usage("--figure {}: {}: {}", figure, r.label, what);
}

void need_trace(std::string_view figure, const Record& r) {
  if (r.planned) refuse(figure, r, "expected a run, got a plan that has not been run");
  if (!r.traced) refuse(figure, r, "the run has no trace; train with --trace to record one");
}

StepSpan traced_step(std::string_view figure, const Record& r) {
  need_trace(figure, r);
  const StepSpan step = median_step(r);
  if (step.step == 0) refuse(figure, r, "the trace contains no steps");
  return step;
}

void add_new(std::vector<LegendEntry>& to, const std::vector<LegendEntry>& more) {
  for (const LegendEntry& e : more)
    if (std::ranges::none_of(to, [&](const LegendEntry& known) { return known.css == e.css; })) to.push_back(e);
}

void prune_legend(Part& f) {
  std::string bodies;
  for (const Picture& p : f.pictures) bodies += p.body;
  std::erase_if(f.legend, [&](const LegendEntry& e) { return bodies.find("\"" + e.css) == std::string::npos; });
}

// Calls draw(rank, step) for each of a run's first ranks.
template <class F>
void add_ranks(Part& f, const Records& runs, const Record& r, size_t ranks, const F& draw) {
  const StepSpan step = median_step(r);
  for (size_t i = 0; i < std::min(ranks, r.ranks.size()); ++i) {
    Picture& p = f.pictures.emplace_back(draw(r.ranks[i], step));
    p.title = run_title(runs, r, p.title);
  }
}

std::string heading(const std::string& what, const Records& runs) {
  return runs.size() == 1 && !runs[0].planned ? fmt::format("{} of {}", what, runs[0].label) : what;
}

// A forward pass through all chunks of a rank takes one time unit.
Simulation on_equal_times(const Schedule& s) {
  const double part = 1.0 / s.chunks();
  return simulate(s, {.stages = {{.forward = part, .backward = 2 * part, .input = part, .weight = part}}});
}

Part pipelines(const Records& runs, double width) {
  Part f{.id = "pipeline",
         .title = heading("Pipeline", runs),
         .caption =
             "Each row is a rank of the pipeline, time runs to the right, the number in a box is its micro-batch, and "
             "empty space is idle time."};
  std::vector<Simulation> plans;
  double longest = 0;
  for (const Record& r : runs) {
    if (!r.planned) need_trace("pipeline", r);
    if (r.schedule.ranks < 2) refuse("pipeline", r, "expected at least 2 pipeline ranks, got 1");
    longest = std::max(longest, plans.emplace_back(on_equal_times(r.schedule)).makespan);
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    const Record& r = runs[i];
    add_new(f.legend, pass_legend(r.schedule));
    const Simulation& plan = plans[i];
    const std::string bubble = fmt::format("bubble {} of the time", percent(plan.bubble_fraction()));
    if (r.planned) {
      const double held = static_cast<double>(*std::ranges::max_element(plan.in_flight)) / r.schedule.chunks();
      const std::string note = fmt::format("{}, at most {:.3g} micro-batches in flight on a rank", bubble, held);
      f.pictures.push_back(
          render_lanes(panel_lanes({plan, run_title(runs, r, note), longest, units, tick_of_units}, width)));
      f.caption += fmt::format(" {}: {}.", r.label, bubble);
      continue;
    }
    const StepSpan step = median_step(r);
    const std::optional<MeasuredPipeline> p = measure_pipeline(r, step);
    if (!p) refuse("pipeline", r, "the trace contains no step with all actions of the schedule");
    for (Panel& panel : make_panels(r, *p, step)) {
      panel.title = run_title(runs, r, fmt::format("{}, bubble {}", panel.title, percent(panel.sim.bubble_fraction())));
      f.pictures.push_back(render_lanes(panel_lanes(panel, width)));
    }
  }
  f.legend.push_back({"idle", "idle"});
  return f;
}

std::vector<LegendEntry> timeline_legend(const Record& r) {
  std::vector<LegendEntry> out = pass_legend(r.schedule);
  out.insert(out.end(), {{"k-fin", "gradient reduction and norm"}, {"k-opt", "optimizer"}});
  if (r.waits_noted) out.push_back({"wait", "exposed communication"});
  if (r.schedule.ranks > 1) out.push_back({"k-msg", "messages"});
  for (const char* axis : {"dp", "tp", "cp", "pp"})
    if (std::ranges::any_of(r.sent, [&](const SentBytes& s) {
          return s.axis.starts_with(axis) && s.operation != "send" && s.operation != "recv";
        }))
      out.push_back({fmt::format("a-{}", axis), fmt::format("collectives of {}", axis)});
  if (r.ranks.size() > 1) out.push_back({"a-world", "other groups"});
  return out;
}

Part timelines(const Records& runs, double width) {
  Part f{.id = "timeline",
         .title = heading("Timeline of a step", runs),
         .caption =
             "For each rank, the upper row shows computation and the rows below it concurrent communication. A grey "
             "line in a pass marks exposed communication."};
  double span = 1e-9;
  for (const Record& r : runs) {
    const StepSpan step = traced_step("timeline", r);
    span = std::max(span, step.end - step.begin);
  }
  for (const Record& r : runs) {
    add_new(f.legend, timeline_legend(r));
    add_ranks(f, runs, r, shown_ranks(width),
              [&](const Rank& rank, const StepSpan& step) { return rank_timeline(r, rank, step, span, width); });
  }
  prune_legend(f);
  return f;
}

// One bar per group of identical ranks.
Part planned_memory(const Records& runs, double width) {
  Part f{.id = "memory",
         .title = heading("Memory of a rank at its peak", runs),
         .caption = "Each bar is the memory of a rank, by category.",
         .legend = memory_legend()};
  Lanes bars{.title = "", .width = width, .right = kValueMargin};
  for (const Record& r : runs)
    for (size_t first = 0, next; first < r.ranks.size(); first = next) {
      for (next = first + 1; next < r.ranks.size() && r.ranks[next].peaks == r.ranks[first].peaks;) ++next;
      const std::string ranks = next == first + 1                      ? fmt::format("rank {}", first)
                                : first == 0 && next == r.ranks.size() ? fmt::format("each of {} ranks", next)
                                                                       : fmt::format("ranks {} to {}", first, next - 1);
      const Rank& rank = r.ranks[first];
      Lane bar{.name = run_title(runs, r, ranks), .suffix = short_bytes(static_cast<double>(rank.peak))};
      f.caption += fmt::format(" {}: {}.", bar.name, bar.suffix);
      bars.max = std::max(bars.max, static_cast<double>(rank.peak));
      for (size_t c = 0; c < kCategories; ++c) {
        const auto bytes = static_cast<double>(rank.peaks[c]);
        stack(bar, bytes, fmt::format("m{} pass", c),
              fmt::format("{}: {} bytes", to_string(static_cast<Category>(c)), grouped(rank.peaks[c])),
              short_bytes(bytes));
      }
      bars.lanes.push_back(std::move(bar));
    }
  bars.left = left_edge(bars.lanes);
  f.pictures = {render_lanes(bars)};
  prune_legend(f);
  return f;
}

Part memories(const Records& runs, double width) {
  if (std::ranges::all_of(runs, &Record::planned)) return planned_memory(runs, width);
  Part f{.id = "memory",
         .title = heading("Memory in a step", runs),
         .caption = "The height of a colour is the memory in that category; time runs to the right.",
         .legend = memory_legend()};
  int64_t max_bytes = 1;
  for (const Record& r : runs) {
    const StepSpan step = traced_step("memory", r);
    for (const Rank& rank : r.ranks)
      for (const MemorySample& h : span_samples(rank, step)) max_bytes = std::max(max_bytes, total(h));
  }
  for (const Record& r : runs)
    add_ranks(f, runs, r, shown_ranks(width), [&](const Rank& rank, const StepSpan& step) {
      return rank_memory(rank, step, 1.05 * static_cast<double>(max_bytes), (width - kFigureGap) / 2);
    });
  return f;
}

Part all_bytes(const Records& runs, double width) {
  Part f{.id = "bytes",
         .title = heading("Bytes sent by all ranks in a step", runs) + ", darker: the busiest rank",
         .caption =
             "Each bar is the traffic of one operation along one axis of the mesh; its darker part is the traffic of "
             "the busiest rank. Operations that would be too short to see are omitted."};
  std::vector<Lanes> all;
  std::vector<std::vector<SentBytes>> sent;
  double max_bytes = 1, left = 0;
  for (const Record& r : runs) {
    sent.push_back(r.sent);
    if (!r.planned) {
      const std::vector<SentInStep> step = sent_in_step(r, traced_step("bytes", r));
      sent.back().assign(step.begin(), step.end());
    }
    for (const SentBytes& s : sent.back()) max_bytes = std::max(max_bytes, static_cast<double>(s.bytes));
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    Lanes bars{.title = "", .width = width, .right = kValueMargin};
    double sum = 0;
    for (const SentBytes& s : sent[i]) {
      sum += static_cast<double>(s.bytes);
      if (static_cast<double>(s.bytes) * kMaxBarRatio < max_bytes) continue;
      const auto bytes = static_cast<double>(s.bytes), own = static_cast<double>(s.busiest);
      const std::string css = css_of_axis(s.axis);
      Lane bar{.name = fmt::format("{} {}", s.axis, s.operation), .suffix = short_bytes(bytes)};
      stack(bar, own, css + " pass", fmt::format("{} bytes of the busiest rank", grouped(s.busiest)), short_bytes(own));
      stack(bar, bytes - own, css + kPale, fmt::format("{} bytes in {} calls", grouped(s.bytes), grouped(s.calls)),
            own > 0 ? "" : "busiest rank: unknown");
      bars.lanes.push_back(std::move(bar));
      add_new(f.legend, {{css, "along " + s.axis}});
    }
    left = std::max(left, left_edge(bars.lanes));
    bars.title = run_title(runs, runs[i], fmt::format("{} in total", short_bytes(sum)));
    f.caption += fmt::format(" {}.", bars.title);
    all.push_back(std::move(bars));
  }
  for (Lanes& bars : all) {
    bars.max = max_bytes;
    bars.left = left;
    f.pictures.push_back(render_lanes(bars));
  }
  return f;
}

Part losses(const Records& runs, double width) {
  Part f{.id = "loss",
         .title = heading("Loss by step", runs),
         .caption = "Training loss of each step; circles mark the loss over the validation split."};
  for (size_t i = 0; i < runs.size(); ++i) {
    const Record& r = runs[i];
    if (r.planned) refuse("loss", r, "expected a run, got a plan that has not been run");
    if (r.losses.empty()) refuse("loss", r, "no step was recorded");
    const std::string of = runs.size() > 1 ? r.label + ", " : "";
    f.legend.push_back({fmt::format("loss-key{}", second(i)), of + "training"});
    if (!r.validations.empty()) f.legend.push_back({fmt::format("val{}", second(i)), of + "validation"});
  }
  f.pictures = {loss_picture(runs, width)};
  return f;
}

}  // namespace

std::string css_of_axis(const std::string& axis) {
  for (const char* known : {"dp", "tp", "cp", "pp"})
    if (axis.starts_with(known)) return fmt::format("a-{}", known);
  return "a-world";
}

Lanes panel_lanes(const Panel& p, double width) {
  const Schedule& s = p.sim.schedule;
  Lanes out{.title = p.title, .max = p.scale, .width = width, .gap = 4, .axis = p.tick};
  out.tall = s.chunks() > 1 ? 34 : 26;  // fits a letter above a number in narrow boxes
  for (size_t r = 0; r < p.sim.actions.size(); ++r) {
    Lane lane{.name = fmt::format("pipeline rank {}", r)};
    lane.marks = {
        {0, p.sim.makespan, "idle",
         fmt::format("idle | rank {} is idle for {} of {}", r, p.format(p.sim.idle[r]), p.format(p.sim.makespan))}};
    for (const TimedAction& t : p.sim.actions[r]) {
      Mark mark{t.start, t.end, "wait",
                fmt::format("{} | rank {}, stage {}, micro-batch {} | from {} for {}", t.action.str(), r,
                            t.action.stage, t.action.microbatch, p.format(t.start), p.format(t.end - t.start))};
      if (t.action.is_message()) {
        mark.thin = true;
        const bool waits = t.action.what == PassKind::recv_forward || t.action.what == PassKind::recv_backward;
        if (!waits || t.end <= t.start) continue;
      } else {
        const bool visible = (t.end - t.start) / p.scale * width > 3;  // narrower boxes would be all border
        mark.css = fmt::format("k-{}{}", to_string(t.action.what), visible ? " pass" : "");
        mark.css += pale(s, t.action.stage);
        const std::string letter(to_string(t.action.what)), number = fmt::format("{}", t.action.microbatch);
        mark.labels = {letter + number, fmt::format("{}\n{}", letter, number), number};
        mark.attributes = fmt::format(" data-mb=\"{}\"", t.action.microbatch);
      }
      lane.marks.push_back(std::move(mark));
    }
    out.lanes.push_back(std::move(lane));
  }
  return out;
}

std::vector<LegendEntry> pass_legend(const Schedule& s) {
  std::vector<LegendEntry> out = {{"k-F", "F: forward"}};
  if (s.has(PassKind::B)) out.push_back({"k-B", "B: backward"});
  if (s.has(PassKind::I)) out.push_back({"k-I", "I: gradient of the input"});
  if (s.has(PassKind::W)) out.push_back({"k-W", "W: gradient of the weights"});
  if (s.chunks() > 1) out.push_back({"k-F c1", "paler: a rank's later stages"});
  return out;
}

std::vector<Panel> make_panels(const Record& r, const MeasuredPipeline& p, const StepSpan& step) {
  const double ms = std::max({p.replayed.makespan, r.shared ? 0 : p.measured.makespan, 1e-9});
  std::vector<Panel> out = {{p.equal, "Planned, equal times", p.equal.makespan, units, tick_of_units},
                            {p.replayed, "Planned, measured times", ms}};
  if (!r.shared) out.push_back({p.measured, fmt::format("Measured, step {}", step.step), ms});
  return out;
}

std::vector<LegendEntry> memory_legend() {
  std::vector<LegendEntry> out;
  for (size_t c = 0; c < kCategories; ++c)
    out.push_back({fmt::format("m{}", c), std::string(to_string(static_cast<Category>(c)))});
  return out;
}

Part make_figure(std::string_view name, const std::vector<Record>& runs, double width) {
  if (name == "pipeline") return pipelines(runs, width);
  if (name == "timeline") return timelines(runs, width);
  if (name == "memory") return memories(runs, width);
  if (name == "bytes") return all_bytes(runs, width);
  return losses(runs, width);
}

}  // namespace tessera::report
