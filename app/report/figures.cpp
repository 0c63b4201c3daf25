// What each figure needs of a run, and how runs share a scale.
#include "app/report/figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "app/report/parts.h"
#include "tensor/error.h"

namespace tessera::report {
namespace {

constexpr size_t kMostRanks = 8;  // of a run
constexpr double kBetween = 16;

using Records = std::vector<Record>;

// "what (label)", where there are several.
std::string of_run(const Records& runs, const Record& r, const std::string& what) {
  if (runs.size() == 1) return what;
  return what.empty() ? r.label : fmt::format("{}: {}", r.label, what);
}

[[noreturn]] void refuse(std::string_view figure, const Record& r, const std::string& what) {
  throw Error(fmt::format("--figure {}: {}: {}", figure, r.label, what));
}

void need_trace(std::string_view figure, const Record& r) {
  if (r.planned) refuse(figure, r, "expected a run, found a plan that has not run");
  if (!r.traced) refuse(figure, r, "the run has no trace; train with --trace to have one");
}

StepSpan drawn_step(std::string_view figure, const Record& r) {
  need_trace(figure, r);
  const StepSpan step = median_step(r);
  if (step.step == 0) refuse(figure, r, "its trace has no step");
  return step;
}

void add_new(std::vector<LegendEntry>& to, const std::vector<LegendEntry>& more) {
  for (const LegendEntry& e : more)
    if (std::ranges::none_of(to, [&](const LegendEntry& known) { return known.css == e.css; })) to.push_back(e);
}

// Of the legend what is drawn.
void keep_drawn(Figure& f) {
  std::string drawn;
  for (const Picture& p : f.pictures) drawn += p.body;
  std::erase_if(f.legend, [&](const LegendEntry& e) { return drawn.find("\"" + e.css) == std::string::npos; });
}

// The names of runs, where there are several, at the end of a heading.
std::string heading(const std::string& what, const Records& runs) {
  return runs.size() == 1 && !runs[0].planned ? fmt::format("{} of {}", what, runs[0].label) : what;
}

// Forward takes one unit through all that a rank has.
Simulation on_equal_times(const Schedule& s) {
  const double part = 1.0 / s.chunks();
  return simulate(s, {.stages = {{.forward = part, .backward = 2 * part, .input = part, .weight = part}}});
}

Figure pipelines(const Records& runs, double width) {
  Figure f{.title = heading("Pipeline", runs),
           .words =
               "Each row is a rank of the pipeline, time runs to the right, the number in a box is its "
               "micro-batch, and empty space is time in which a rank waits."};
  std::vector<Simulation> plans;
  std::vector<MeasuredPipeline> measured;
  double units = 0;
  for (const Record& r : runs) {
    if (!r.planned) need_trace("pipeline", r);
    if (r.schedule.ranks < 2) refuse("pipeline", r, "expected at least 2 pipeline ranks, found 1");
    units = std::max(units, plans.emplace_back(on_equal_times(r.schedule)).makespan);
  }
  measured.reserve(runs.size());  // pictures refer to them
  for (size_t i = 0; i < runs.size(); ++i) {
    const Record& r = runs[i];
    add_new(f.legend, pass_legend(r.schedule));
    const Simulation& plan = plans[i];
    const std::string bubble = fmt::format("bubble {} of the time", percent(plan.bubble_share()));
    if (r.planned) {
      const double held = static_cast<double>(*std::ranges::max_element(plan.in_flight)) / r.schedule.chunks();
      f.pictures.push_back(panel_picture(
          {plan, of_run(runs, r, fmt::format("{}, at most {:.3g} micro-batches in flight on a rank", bubble, held)),
           units, false, width}));
      f.words += fmt::format(" {}: {}.", r.label, bubble);
      continue;
    }
    const StepSpan step = median_step(r);
    std::optional<MeasuredPipeline> p = measure_pipeline(r, step);
    if (!p) refuse("pipeline", r, "its trace has no step with all actions of the schedule");
    measured.push_back(std::move(*p));
    for (Panel& panel : panels_of(r, measured.back(), step)) {
      panel.title = of_run(runs, r, fmt::format("{}, bubble {}", panel.title, percent(panel.sim.bubble_share())));
      panel.width = width;
      f.pictures.push_back(panel_picture(panel));
    }
  }
  f.legend.push_back({"idle", "idle"});
  return f;
}

Figure timelines(const Records& runs, double width) {
  Figure f{.title = heading("Timeline of a step", runs),
           .words =
               "For each rank the upper row is what it computes, and the rows below are what it communicates at the "
               "same time. A grey line in a pass is time in which communication held it up."};
  double span = 1e-9;
  std::vector<StepSpan> steps;
  for (const Record& r : runs) {
    const StepSpan& step = steps.emplace_back(drawn_step("timeline", r));
    span = std::max(span, step.end - step.begin);
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    add_new(f.legend, timeline_legend(runs[i]));
    for (size_t k = 0; k < std::min(runs[i].ranks.size(), kMostRanks); ++k) {
      Picture p = rank_timeline(runs[i].ranks[k], steps[i], span, width);
      p.title = of_run(runs, runs[i], p.title);
      f.pictures.push_back(std::move(p));
    }
  }
  keep_drawn(f);
  return f;
}

// What ranks hold by theory: a bar for each kind of rank.
Figure planned_memory(const Records& runs, double width) {
  Figure f{.title = heading("Memory of a rank at its peak", runs),
           .words = "Each bar is what a rank holds, by category.",
           .legend = memory_legend()};
  Bars bars{.title = "", .bars = {}, .width = width};
  for (const Record& r : runs)
    for (size_t first = 0, next; first < r.ranks.size(); first = next) {
      for (next = first + 1; next < r.ranks.size() && r.ranks[next].peaks == r.ranks[first].peaks;) ++next;
      const std::string ranks = next == first + 1                      ? fmt::format("rank {}", first)
                                : first == 0 && next == r.ranks.size() ? fmt::format("each of {} ranks", next)
                                                                       : fmt::format("ranks {} to {}", first, next - 1);
      Bar& bar = bars.bars.emplace_back();
      const Rank& rank = r.ranks[first];
      bar.name = of_run(runs, r, ranks);
      bar.total = short_bytes(static_cast<double>(rank.peak));
      f.words += fmt::format(" {}: {}.", bar.name, bar.total);
      bars.most = std::max(bars.most, static_cast<double>(rank.peak));
      for (size_t c = 0; c < kCategories; ++c)
        bar.parts.push_back({fmt::format("m{}", c),
                             fmt::format("{}: {} bytes", name_of(static_cast<Category>(c)), grouped(rank.peaks[c])),
                             static_cast<double>(rank.peaks[c])});
    }
  f.pictures = {bars_picture(bars)};
  keep_drawn(f);
  return f;
}

Figure memories(const Records& runs, double width) {
  if (std::ranges::all_of(runs, &Record::planned)) return planned_memory(runs, width);
  Figure f{.title = heading("Memory in a step", runs),
           .words = "The height of a colour is what a rank held of that kind; time runs to the right.",
           .legend = memory_legend()};
  int64_t most = 1;
  for (const Record& r : runs) {
    const StepSpan step = drawn_step("memory", r);
    for (const Rank& rank : r.ranks) most = std::max(most, most_held(rank, step));
  }
  for (const Record& r : runs)
    for (size_t k = 0; k < std::min(r.ranks.size(), kMostRanks); ++k) {
      Picture p =
          rank_memory(r.ranks[k], median_step(r), 1.05 * static_cast<double>(most), (width - kBetween) / 2, false);
      p.title = of_run(runs, r, p.title);
      f.pictures.push_back(std::move(p));
    }
  return f;
}

Figure all_bytes(const Records& runs, double width) {
  Figure f{.title = heading("Bytes that all ranks together send in a step", runs),
           .words = "Each bar is what one operation sends along one axis of the mesh."};
  std::vector<Bars> all;
  double most = 1;
  bool shares = false;
  for (const Record& r : runs) {
    Bars& bars = all.emplace_back();
    std::vector<SentInStep> sent;
    if (r.planned)
      for (const Sent& s : r.sent) sent.push_back({s.axis, s.operation, s.calls, s.bytes, s.most});
    else
      sent = sent_in_step(r, drawn_step("bytes", r));
    double sum = 0;
    for (const SentInStep& s : sent) {
      if (s.bytes == 0) continue;
      const auto bytes = static_cast<double>(s.bytes), own = static_cast<double>(s.most);
      const std::string css = css_of_axis(s.axis);
      Bar& bar = bars.bars.emplace_back();
      bar.name = fmt::format("{} {}", s.axis, s.operation);
      bar.total = short_bytes(bytes);
      if (s.most > 0) bar.parts.push_back({css, fmt::format("{} bytes of the busiest rank", grouped(s.most)), own});
      bar.parts.push_back({s.most > 0 ? css + " c2" : css,
                           fmt::format("{} bytes in {} calls", grouped(s.bytes), grouped(s.calls)), bytes - own});
      shares = shares || s.most > 0;
      most = std::max(most, bytes);
      sum += bytes;
      add_new(f.legend, {{css, "along " + s.axis}});
    }
    bars.title = of_run(runs, r, fmt::format("{} in all", short_bytes(sum)));
    f.words += fmt::format(" {}.", bars.title);
  }
  if (shares) f.words += " The darker part of a bar is what the busiest rank sends.";
  if (shares) f.title += ", darker: the busiest rank";
  for (Bars& bars : all) {
    bars.most = most;
    bars.width = width;
    f.pictures.push_back(bars_picture(bars));
  }
  return f;
}

Figure losses(const Records& runs, double width) {
  std::vector<const Record*> all;
  for (const Record& r : runs) {
    if (r.planned) refuse("loss", r, "expected a run, found a plan that has not run");
    if (r.losses.empty()) refuse("loss", r, "no step was recorded");
    all.push_back(&r);
  }
  Figure f{.title = heading("Loss by step", runs),
           .words = "The training loss of each step, and circles for the loss over the validation split.",
           .legend = loss_legend(all)};
  Picture p = loss_picture(all, width);
  p.title = "";
  f.pictures = {std::move(p)};
  return f;
}

}  // namespace

Figure figure_of(std::string_view name, const std::vector<Record>& runs, double width) {
  if (name == "pipeline") return pipelines(runs, width);
  if (name == "timeline") return timelines(runs, width);
  if (name == "memory") return memories(runs, width);
  if (name == "bytes") return all_bytes(runs, width);
  return losses(runs, width);
}

}  // namespace tessera::report
