// Events, their tracks and their arguments.
#include "app/trace/timeline.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "parallel/pipeline/schedule.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

std::string track_of(const TraceEvent& e) {
  if (e.kind == TraceKind::phase) return "update";
  if (e.kind == TraceKind::wait) return "waiting";
  if (e.kind == TraceKind::communication) {
    if (e.what == "send") return "send";
    return e.what == "recv" ? "receive" : "collective " + e.axis;
  }
  switch (Action::parse(e.what).what) {
    case Do::F:
      return "forward";
    case Do::B:
      return "backward";
    case Do::I:
      return "input gradient";
    case Do::W:
      return "weight gradient";
    case Do::send_forward:
    case Do::send_backward:
      return "send";
    case Do::recv_forward:
    case Do::recv_backward:
      return "receive";
    default:
      return "update";
  }
}

double microseconds(double seconds) { return std::round(seconds * 1e9) / 1e3; }

// One rank's part of the file.
class RankTimeline {
 public:
  RankTimeline(const RankLog& log, int rank, double add) : log_(log), rank_(rank), add_(add) {}

  void write(std::vector<Json>& out, const std::string& name) {
    meta(out, "process_name", 0, name);
    out.push_back(
        {{"ph", "M"}, {"name", "process_sort_index"}, {"pid", rank_}, {"tid", 0}, {"args", {{"sort_index", rank_}}}});
    std::vector<Json> events;
    for (const TraceStep& s : log_.steps)
      add(events, {.what = "step " + std::to_string(s.step), .axis = {}, .begin = s.begin, .end = s.end}, "step", {});
    add_events(events);
    for (const auto& [track, number] : numbers_) meta(out, "thread_name", number, track);
    for (const auto& [track, number] : numbers_)
      out.push_back({{"ph", "M"},
                     {"name", "thread_sort_index"},
                     {"pid", rank_},
                     {"tid", number},
                     {"args", {{"sort_index", number}}}});
    out.insert(out.end(), events.begin(), events.end());
    add_memory(out);
  }

 private:
  void meta(std::vector<Json>& out, const char* what, int tid, const std::string& name) const {
    out.push_back({{"ph", "M"}, {"name", what}, {"pid", rank_}, {"tid", tid}, {"args", {{"name", name}}}});
  }

  // Tracks of axes get the numbers behind the others as they are met.
  int number_of(const std::string& track) {
    const auto* const found = std::find(std::begin(kTracks), std::end(kTracks), track);
    const auto known = static_cast<int>(found - std::begin(kTracks));
    if (found != std::end(kTracks)) return numbers_.try_emplace(track, known + 1).first->second;
    const auto at = numbers_.find(track);
    if (at != numbers_.end()) return at->second;
    return numbers_[track] = static_cast<int>(std::size(kTracks)) + ++axes_;
  }

  int64_t step_at(double time) const {
    for (const TraceStep& s : log_.steps)
      if (time >= s.begin && time <= s.end) return s.step;
    return 0;
  }

  void add(std::vector<Json>& out, const TraceEvent& e, const std::string& track, Json args) {
    args["step"] = step_at(e.begin);
    out.push_back({{"ph", "X"},
                   {"name", e.what},
                   {"cat", track},
                   {"pid", rank_},
                   {"tid", number_of(track)},
                   {"ts", microseconds(add_ + e.begin)},
                   {"dur", microseconds(e.end - e.begin)},
                   {"args", std::move(args)}});
  }

  // A message of the pipeline is one event, though both its action and its communication are noted.
  void add_events(std::vector<Json>& out) {
    const std::vector<TraceEvent>& events = log_.events;
    std::vector<const TraceEvent*> inside(events.size(), nullptr);
    std::vector<bool> drawn(events.size(), false);
    std::optional<size_t> message;  // the last that was sent or received
    for (size_t i = 0; i < events.size(); ++i) {
      const TraceEvent& e = events[i];
      if (e.kind == TraceKind::communication && (e.what == "send" || e.what == "recv")) message = i;
      if (e.kind != TraceKind::action || !Action::parse(e.what).is_message()) continue;
      if (!message || events[*message].begin < e.begin) continue;
      inside[i] = &events[*message];
      drawn[*message] = true;
      message.reset();
    }
    for (size_t i = 0; i < events.size(); ++i)
      if (!drawn[i]) add(out, events[i], track_of(events[i]), arguments(events[i], inside[i]));
  }

  static Json arguments(const TraceEvent& e, const TraceEvent* message) {
    Json args = Json::object();
    if (e.kind == TraceKind::action) {
      const Action action = Action::parse(e.what);
      args["stage"] = action.stage;
      args["microbatch"] = action.microbatch;
      args["processor"] = microseconds(e.processor);
    }
    const TraceEvent& sent = message ? *message : e;
    if (sent.kind != TraceKind::communication) return args;
    args["axis"] = sent.axis;
    args["operation"] = sent.what;
    args["bytes"] = sent.bytes;
    args["sent"] = sent.sent;
    args["queued"] = microseconds(sent.begin - sent.requested);
    return args;
  }

  void add_memory(std::vector<Json>& out) const {
    const TraceMemory* before = nullptr;
    for (const TraceMemory& m : log_.memory) {
      if (before && before->live == m.live && &m != &log_.memory.back()) continue;
      before = &m;
      Json held = Json::object();
      for (size_t c = 0; c < m.live.size(); ++c) held[std::string(name_of(static_cast<Category>(c)))] = m.live[c];
      out.push_back({{"ph", "C"},
                     {"name", "memory"},
                     {"pid", rank_},
                     {"tid", 0},
                     {"ts", microseconds(add_ + m.time)},
                     {"args", held}});
    }
  }

  const RankLog& log_;
  int rank_;
  double add_;
  int axes_ = 0;
  std::map<std::string, int> numbers_;
};

}  // namespace

std::string timeline_json(const std::vector<RankLog>& logs, const std::vector<std::string>& names,
                          const std::string& kept) {
  const Alignment clock = align(logs);
  std::vector<Json> events;
  for (size_t r = 0; r < logs.size(); ++r)
    RankTimeline(logs[r], static_cast<int>(r), clock.add[r]).write(events, names[r]);
  std::string text =
      "{\"displayTimeUnit\": \"ms\",\n\"otherData\": " +
      Json{{"program", "tessera"}, {"kept", kept}, {"left_out", "what lies between steps"}, {"clock", clock.words}}
          .dump() +
      ",\n\"traceEvents\": [";
  const char* before = "\n";
  for (const Json& e : events) {
    text += before + e.dump();
    before = ",\n";
  }
  return text + "\n]}\n";
}

}  // namespace tessera
