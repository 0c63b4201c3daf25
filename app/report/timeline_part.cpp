// Every rank's tracks in one step: computing above, communication below it.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "app/report/parts.h"
#include "app/report/svg.h"

namespace tessera::report {
namespace {

constexpr double kRow = 20, kGap = 3, kAxis = 22;
constexpr double kThin = 4, kSeen = 0.3;  // of waits: how tall, and how long in pixels those are that are drawn
constexpr size_t kMostRanks = 16;         // that are drawn

// A row of a rank's picture.
struct Track {
  std::string name;
  std::vector<const Event*> events;
};

bool computes(const Event& e) {
  return e.track != "step" && e.track != "waiting" && e.operation.empty() && e.track != "send" && e.track != "receive";
}

// Computing first; sends and receives share a row, each axis has its own.
std::vector<Track> tracks_of(const Rank& rank, const StepSpan& step) {
  std::map<std::string, Track> by_name;
  Track compute{"computing", {}};
  for (const Event& e : rank.events) {
    if (e.step != step.step || e.track == "step" || e.track == "waiting") continue;
    if (computes(e)) {
      compute.events.push_back(&e);
      continue;
    }
    const std::string name = e.track == "send" || e.track == "receive" ? "messages" : e.track;
    by_name.try_emplace(name, Track{name, {}}).first->second.events.push_back(&e);
  }
  std::vector<Track> out = {compute};
  for (auto& [name, track] : by_name) out.push_back(std::move(track));
  return out;
}

std::string css_of(const Event& e) {
  if (e.track == "forward") return "k-F";
  if (e.track == "backward") return "k-B";
  if (e.track == "input gradient") return "k-I";
  if (e.track == "weight gradient") return "k-W";
  if (e.track == "update") return e.name == "optimizer" ? "k-opt" : "k-fin";
  if (e.track == "send" || e.track == "receive") return "k-msg";
  return css_of_axis(e.axis);
}

std::string tip_of(const Event& e, const StepSpan& step) {
  std::string tip = fmt::format("{} | {} | from {} for {}", e.name, e.track, short_time(e.begin - step.begin),
                                short_time(e.end - e.begin));
  if (e.stage >= 0) tip += fmt::format(" | stage {}, micro-batch {}", e.stage, e.microbatch);
  if (!e.operation.empty())
    tip += fmt::format(" | axis {}, an array of {}, {} sent", e.axis, short_bytes(static_cast<double>(e.bytes)),
                       short_bytes(static_cast<double>(e.sent)));
  return tip;
}

}  // namespace

Picture rank_timeline(const Rank& rank, const StepSpan& step, double span, double width) {
  const std::vector<Track> tracks = tracks_of(rank, step);
  const double height = static_cast<double>(tracks.size()) * kRow, pixel = (width - kGutter) / span;
  Picture out{.title = rank.name, .width = width, .height = height + kAxis};
  const auto at = [&](const Event& e, double y, double tall) {
    return Box{kGutter + (e.begin - step.begin) * pixel, y, (e.end - e.begin) * pixel, tall};
  };
  for (size_t t = 0; t < tracks.size(); ++t) {
    const double y = static_cast<double>(t) * kRow;
    out.body += text_at(kGutter - 8, y + 13, "end", tracks[t].name);
    out.body += fmt::format("<rect class=\"idle\" x=\"{}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\"/>\n", kGutter, y,
                            (step.end - step.begin) * pixel, kRow - kGap);
    for (const Event* e : tracks[t].events)
      out.body += box(at(*e, y, kRow - kGap), css_of(*e), tip_of(*e, step),
                      {e->name, e->stage >= 0 ? fmt::format("{}", e->microbatch) : ""});
  }
  for (const Event& e : rank.events)  // over what it computes
    if (e.track == "waiting" && e.step == step.step && (e.end - e.begin) * pixel > kSeen)
      out.body += box(at(e, kRow - kGap - kThin, kThin), "wait", tip_of(e, step));
  out.body += time_axis({.width = width, .y = height + 14, .span = span});
  return out;
}

std::vector<LegendEntry> timeline_legend(const Record& r) {
  std::vector<LegendEntry> out = pass_legend(r.schedule);
  out.insert(out.end(), {{"k-fin", "finishing gradients, their norm"}, {"k-opt", "optimizer"}});
  if (r.waits_noted) out.push_back({"wait", "held up by communication"});
  if (r.schedule.ranks > 1) out.push_back({"k-msg", "messages"});
  for (const char* axis : {"dp", "tp", "cp", "pp"})
    for (const Sent& s : r.sent)
      if (s.axis.starts_with(axis) && s.operation != "send" && s.operation != "recv") {
        out.push_back({fmt::format("a-{}", axis), fmt::format("collectives of {}", axis)});
        break;
      }
  if (r.ranks.size() > 1) out.push_back({"a-world", "of other groups"});
  return out;
}

std::string timeline_part(const Record& r, const StepSpan& step) {
  std::string out = fmt::format(
      "<section id=\"timeline\">\n<h2>Timeline of step {}</h2>\n<p>For each rank the upper row is what it computes and "
      "the rows below are what it communicates at the same time. Communication below a box that computes costs no "
      "time. Below empty space, or below the grey line of a pass that waits for it, it does.</p>\n",
      step.step);
  out += legend(timeline_legend(r));
  const double span = std::max(1e-9, step.end - step.begin);
  for (size_t i = 0; i < std::min(kMostRanks, r.ranks.size()); ++i)
    out += fmt::format("<h3>{}</h3>\n", escaped(r.ranks[i].name)) +
           inline_svg(rank_timeline(r.ranks[i], step, span, kWidth));
  if (r.ranks.size() > kMostRanks)
    out += fmt::format("<p class=\"note\">The first {} of {} ranks are drawn; trace.json has all.</p>\n", kMostRanks,
                       r.ranks.size());
  out +=
      "<p class=\"note\">All tracks of all kept steps: open trace.json, which lies beside this file in the run "
      "directory, in ui.perfetto.dev.</p>\n";
  return out + "</section>\n";
}

}  // namespace tessera::report
