// Checks of HTML pages, and of `tessera report --format text` against report.json and trace.json.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "app/resolve.h"
#include "tests/app/program.h"
#include "train/expected_bytes.h"
#include "train/trainer.h"

namespace tessera::test {

// Tags are balanced, quotes are paired within each tag, and text contains no special characters; styles and scripts are
// not checked.
inline void expect_balanced(const std::string& html) {
  std::vector<std::string> open;
  for (size_t at = html.find('<'); at != std::string::npos; at = html.find('<', at + 1)) {
    const size_t end = html.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = html.substr(at + 1, end - at - 1), name = tag.substr(0, tag.find_first_of(" /", 1));
    EXPECT_EQ(tag.find('<'), std::string::npos) << tag;
    EXPECT_EQ(std::count(tag.begin(), tag.end(), '"') % 2, 0) << tag;
    if (tag.starts_with("!") || tag.ends_with("/")) continue;
    if (tag.starts_with("/")) {
      ASSERT_FALSE(open.empty()) << tag;
      ASSERT_EQ("/" + open.back(), tag);
      open.pop_back();
    } else {
      open.push_back(name);
      if (name == "style" || name == "script") at = html.find("</", end) - 1;
    }
  }
  EXPECT_TRUE(open.empty());
}

inline void expect_page(const std::string& html) {
  expect_balanced(html);
  for (const char* none : {"http", "url(", "@import", " src=", "\"nan", ",nan", ">nan", " nan", "inf "})
    EXPECT_EQ(html.find(none), std::string::npos) << none;
}

// The arguments of trace events that have this key.
inline std::vector<Json> args_with(const Json& trace, const char* key) {
  std::vector<Json> out;
  for (const Json& e : trace["traceEvents"])
    if (e["ph"] == "X" && e["args"].contains(key)) out.push_back(e["args"]);
  return out;
}

// Handles both ranks on separate cores and ranks that share cores.
inline void expect_text(const std::string& text, const Json& report, const Json& trace) {
  const auto has = [&](const std::string& part) { return text.find(part) != std::string::npos; };
  const bool shared = report["processors"]["shared"], pipeline = report["plan"]["axes"]["pp"] > 1;
  for (const std::string& line : to_lines(text)) {
    EXPECT_LE(line.size(), 120U) << line;
    EXPECT_EQ(line.find(" nan"), std::string::npos) << line;
  }
  EXPECT_EQ(has("\nplanned: "), pipeline);
  EXPECT_EQ(has("\nreplayed: "), pipeline);
  EXPECT_EQ(has("measured: step"), pipeline && !shared);
  EXPECT_EQ(has("measured: not shown"), pipeline && shared);
  EXPECT_EQ(has("measured     null"), pipeline && shared);
  EXPECT_EQ(has("Each rank in this step"), report["ranks"].size() > report["plan"]["axes"]["pp"].get<size_t>());
  const auto step = std::stoll(text.substr(text.find("\nstep ") + 6));  // the shown step
  std::map<std::pair<std::string, std::string>, std::pair<int64_t, int64_t>> sent;
  for (const Json& args : args_with(trace, "operation")) {
    if (args["step"] != step) continue;
    auto& [calls, bytes] = sent[{args["axis"], args["operation"]}];
    ++calls, bytes += args["sent"].get<int64_t>();
  }
  for (const auto& [name, counted] : sent)
    EXPECT_TRUE(
        has(fmt::format("\n{:<6} {:<15} {:>8} {:>15} ", name.first, name.second, counted.first, counted.second)))
        << name.first << " " << name.second;
  for (size_t r = 0; r < report["ranks"].size(); ++r) {
    std::string row = fmt::format("\n{:<6}", r);
    for (const char* category : {"parameters", "gradients", "optimizer", "activations", "workspace", "communication"})
      row += fmt::format(" {:>13}", report["ranks"][r]["peaks"][category].get<int64_t>());
    const auto peak = report["ranks"][r]["peak_bytes"].get<int64_t>();
    EXPECT_TRUE(has(row + fmt::format(" {:>13} {:>9.2f}\n", peak, static_cast<double>(peak) / 1e6))) << row;
  }
}

// Checks of trace.json against report.json and the plan: tracks, actions, bytes, memory.

struct Span {
  double begin, end;
  std::string name;
};

// Sorted by begin and not overlapping, up to the rounding of times to a nanosecond.
inline void expect_apart(std::vector<Span> spans, const std::string& where) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < spans.size(); ++i)
    EXPECT_GE(spans[i].begin, spans[i - 1].end - 0.002) << where << ": " << spans[i - 1].name << ", " << spans[i].name;
}

// Every event is on a named track; events of a track and actions of a rank do not overlap.
inline void expect_tracks(const Json& trace, int ranks) {
  static const std::regex known(
      "step|forward|backward|input gradient|weight gradient|send|receive|update|waiting|collective .+");
  std::map<std::pair<int, int>, std::string> tracks;
  std::map<std::string, std::vector<Span>> spans;
  std::set<int> processes;
  for (const Json& e : trace["traceEvents"]) {
    if (e["ph"] == "M" && e["name"] == "process_name") processes.insert(e["pid"].get<int>());
    if (e["ph"] == "M" && e["name"] == "thread_name") tracks[{e["pid"], e["tid"]}] = e["args"]["name"];
    if (e["ph"] != "X") continue;
    const auto track = tracks.find({e["pid"], e["tid"]});
    ASSERT_NE(track, tracks.end()) << e;
    EXPECT_TRUE(std::regex_match(track->second, known)) << track->second;
    EXPECT_GE(e["ts"].get<double>(), 0);
    EXPECT_GE(e["dur"].get<double>(), 0);
    const Span span{e["ts"], e["ts"].get<double>() + e["dur"].get<double>(), e["name"]};
    const std::string rank = fmt::format("rank {}", e["pid"].get<int>());
    spans[rank + " " + track->second].push_back(span);
    if (!e["args"].contains("stage")) continue;
    spans[rank + " actions"].push_back(span);
    EXPECT_GE(e["args"]["processor"].get<double>(), 0) << e;
    EXPECT_LE(e["args"]["processor"].get<double>(), e["dur"].get<double>() * 1.01 + 20) << e;
  }
  EXPECT_EQ(static_cast<int>(processes.size()), ranks);
  for (const auto& [where, list] : spans) expect_apart(list, where);
}

// Each rank executed its list of the schedule exactly once in each of the three steps.
inline void expect_actions(const Json& trace, const Json& report) {
  const Schedule schedule = parse_schedule(report["plan"]["schedule"]["text"].get<std::string>(), "text");
  std::map<std::tuple<int, int64_t, std::string>, int> found;
  for (const Json& e : trace["traceEvents"])
    if (e["ph"] == "X" && e["args"].contains("stage")) ++found[{e["pid"], e["args"]["step"], e["name"]}];
  size_t expected = 0;
  for (int rank = 0; rank < static_cast<int>(report["ranks"].size()); ++rank)
    for (const Action& action : schedule.actions[report["ranks"][static_cast<size_t>(rank)]["at"]["pp"].get<size_t>()])
      for (int64_t step = 1; step <= 3; ++step) {
        ++expected;
        const int times = found[{rank, step, action.str()}];
        EXPECT_EQ(times, 1) << "rank " << rank << ", step " << step << ", " << action.str();
      }
  EXPECT_EQ(found.size(), expected);
}

// The trace has the expected calls and bytes of three steps by axis and operation, and none that the run (including
// validation) did not count.
inline void expect_bytes(const Json& trace, const Json& report, TrainConfig job) {
  using Counts = std::map<std::string, std::pair<int64_t, int64_t>>;
  Counts traced, expected;
  job.model.vocab = report["model"]["vocab"];
  for (const Json& args : args_with(trace, "operation")) {
    auto& [calls, bytes] = traced[args["axis"].get<std::string>() + " " + args["operation"].get<std::string>()];
    ++calls, bytes += args["sent"].get<int64_t>();
  }
  for (const SentBytes& s : expected_bytes(job, 3)) expected[s.axis + " " + s.operation] = {s.calls, s.bytes};
  EXPECT_EQ(traced, expected);
  for (const Json& s : report["sent"]) {
    const auto [calls, bytes] = traced[s["axis"].get<std::string>() + " " + s["operation"].get<std::string>()];
    EXPECT_GE(s["calls"].get<int64_t>(), calls) << s;
    EXPECT_GE(s["bytes"].get<int64_t>(), bytes) << s;
  }
}

// The memory of a rank never exceeds its peaks, and contains its parameters at the end of a step.
inline void expect_memory(const Json& trace, const Json& report) {
  std::map<int, int> samples;
  for (const Json& e : trace["traceEvents"]) {
    if (e["ph"] != "C") continue;
    const Json& rank = report["ranks"][e["pid"].get<size_t>()];
    ++samples[e["pid"]];
    int64_t sum = 0;
    for (const auto& [category, bytes] : e["args"].items()) {
      EXPECT_LE(bytes.get<int64_t>(), rank["peaks"][category].get<int64_t>()) << category;
      sum += bytes.get<int64_t>();
    }
    EXPECT_GT(e["args"]["parameters"].get<int64_t>(), 0);
    EXPECT_LE(sum, rank["peak_bytes"].get<int64_t>());
  }
  EXPECT_EQ(samples.size(), report["ranks"].size());
  for (const auto& [rank, count] : samples) EXPECT_GT(count, 6) << rank;
}

}  // namespace tessera::test
