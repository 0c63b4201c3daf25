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
constexpr size_t kMostRanks = 16;  // that are drawn

// A row of a rank's picture.
struct Track {
  std::string name;
  std::vector<const Event*> events;
};

bool computes(const Event& e) {
  return e.track != "step" && e.operation.empty() && e.track != "send" && e.track != "receive";
}

// Computing first; sends and receives share a row, each axis has its own.
std::vector<Track> tracks_of(const Rank& rank, const StepSpan& step) {
  std::map<std::string, Track> by_name;
  Track compute{"computing", {}};
  for (const Event& e : rank.events) {
    if (e.step != step.step || e.track == "step") continue;
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
  for (const char* axis : {"dp", "tp", "cp", "pp"})
    if (e.axis.starts_with(axis)) return fmt::format("a-{}", axis);
  return "a-world";
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

std::string rank_picture(const Rank& rank, const StepSpan& step) {
  const std::vector<Track> tracks = tracks_of(rank, step);
  const double height = static_cast<double>(tracks.size()) * kRow, span = std::max(1e-9, step.end - step.begin),
               pixel = (kWidth - kGutter) / span;
  std::string out = fmt::format("<h3>{}</h3>\n", escaped(rank.name)) + open_svg(height + kAxis, rank.name);
  for (size_t t = 0; t < tracks.size(); ++t) {
    const double y = static_cast<double>(t) * kRow;
    out += text_at(kGutter - 8, y + 13, "end", tracks[t].name);
    out += fmt::format("<rect class=\"idle\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>", kGutter, y,
                       kWidth - kGutter, kRow - kGap);
    for (const Event* e : tracks[t].events)
      out += box({kGutter + (e->begin - step.begin) * pixel, y, (e->end - e->begin) * pixel, kRow - kGap}, css_of(*e),
                 tip_of(*e, step), e->stage >= 0 ? fmt::format("{}", e->microbatch) : e->name);
  }
  for (const double tick : ticks(0, span, 10))
    if (const double x = kGutter + tick * pixel; x < kWidth - 20)
      out += text_at(x, height + 14, tick > 0 ? "mid" : "start", fmt::format("{:.4g} ms", tick));
  return out + "</svg>\n";
}

std::vector<LegendEntry> entries_of(const Record& r) {
  std::vector<LegendEntry> out = {{"k-F", "forward"}};
  if (r.schedule.has(Do::B)) out.push_back({"k-B", "backward"});
  if (r.schedule.has(Do::I)) out.push_back({"k-I", "input gradient"});
  if (r.schedule.has(Do::W)) out.push_back({"k-W", "weight gradient"});
  out.insert(out.end(), {{"k-fin", "finishing gradients, their norm"}, {"k-opt", "optimizer"}});
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

}  // namespace

std::string timeline_part(const Record& r, const StepSpan& step) {
  std::string out = fmt::format(
      "<section id=\"timeline\">\n<h2>Timeline of step {}</h2>\n<p>For each rank the upper row is what it computes and "
      "the rows below are what it communicates at the same time. Communication beneath a box that computes costs no "
      "time of its own; beneath bare ground, or within a pass that waits for it, it does.</p>\n",
      step.step);
  out += legend(entries_of(r));
  for (size_t i = 0; i < std::min(kMostRanks, r.ranks.size()); ++i) out += rank_picture(r.ranks[i], step);
  if (r.ranks.size() > kMostRanks)
    out += fmt::format("<p class=\"note\">The first {} of {} ranks are drawn; trace.json has all.</p>\n", kMostRanks,
                       r.ranks.size());
  out +=
      "<p class=\"note\">All tracks of all kept steps: open trace.json, which lies beside this file in the run "
      "directory, in ui.perfetto.dev.</p>\n";
  return out + "</section>\n";
}

}  // namespace tessera::report
