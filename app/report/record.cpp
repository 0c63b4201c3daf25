// Reads and validates the files of `train --trace`.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "app/report/report.h"
#include "app/train/output.h"
#include "base/json.h"
#include "train/run/directory.h"

namespace tessera::report {
namespace fs = std::filesystem;
namespace {

using Json = nlohmann::json;
constexpr int64_t kMaxRecorded = 1 << 16;
constexpr double kMaxNumber = 1e15;
constexpr double kMaxTime = 1e12;
constexpr int64_t kMaxBytes = int64_t{1} << 52;  // also limits calls; sums fit in 64 bits

class Value {
 public:
  Value(const Json& json, const std::string& file) : json_(json), file_(file) {}

  [[noreturn]] void refuse(const std::string& expected) const {
    bad_input("{}: expected {}, got {}", file_, expected, json_.dump().substr(0, 60));
  }
  Value operator[](const char* key) const {
    if (!json_.is_object() || !json_.contains(key)) refuse(fmt::format("an object with '{}'", key));
    return {json_.at(key), file_};
  }
  bool has(const char* key) const { return json_.is_object() && json_.contains(key); }
  int64_t count(int64_t max = int64_t{1} << 62) const {
    const std::optional<int64_t> n = natural(json_);
    if (!n || *n > max) refuse(fmt::format("an integer of at most {}", max));
    return *n;
  }
  double number() const {
    if (!json_.is_number() || std::abs(json_.get<double>()) > kMaxNumber) refuse("a finite number in range");
    return json_.get<double>();
  }
  bool truth() const {
    if (!json_.is_boolean()) refuse("true or false");
    return json_.get<bool>();
  }
  std::string text() const {
    if (!json_.is_string()) refuse("a string");
    return json_.get<std::string>();
  }
  std::vector<Value> list() const {
    if (!json_.is_array()) refuse("an array");
    std::vector<Value> out;
    for (const Json& item : json_) out.emplace_back(item, file_);
    return out;
  }
  std::vector<std::pair<std::string, Value>> members() const {
    if (!json_.is_object()) refuse("an object");
    std::vector<std::pair<std::string, Value>> out;
    for (const auto& [key, value] : json_.items()) out.emplace_back(key, Value(value, file_));
    return out;
  }

 private:
  const Json& json_;
  const std::string& file_;
};

std::array<int64_t, kCategories> categories(const Value& value) {
  std::array<int64_t, kCategories> out{};
  for (size_t c = 0; c < out.size(); ++c)
    out[c] = value[std::string(to_string(static_cast<Category>(c))).c_str()].count(kMaxBytes);
  return out;
}

std::string describe_model(const Value& m) {
  return fmt::format("{}: {} layers, {} heads, {} channels, context {}, vocabulary {}, {} parameters, {}",
                     m["name"].text(), m["layers"].count(), m["heads"].count(), m["channels"].count(),
                     m["context"].count(), m["vocab"].count(), m["parameters"].count(), m["dtype"].text());
}

void read_plan(Record& r, const Value& plan, const std::string& file) {
  std::string axes;
  for (const char* axis : {"pp", "dp", "cp", "tp"})
    axes += fmt::format("{}{} {}", axes.empty() ? "" : " x ", axis, plan["axes"][axis].count(kMaxRecorded));
  const Value schedule = plan["schedule"];
  r.schedule = parse_schedule(schedule["text"].text(), file);
  r.schedule.name = schedule["name"].text();
  r.plan = {{"ranks", fmt::format("{} ({})", plan["ranks"].count(kMaxRecorded), axes)},
            {"data axis", plan["strategy"].text()},
            {"all-reduce", plan["all_reduce"].text()},
            {"backend", plan["backend"].text()},
            {"batch", fmt::format("{} sequences, {} micro-batch{} per data rank", plan["batch"].count(),
                                  r.schedule.microbatches, r.schedule.microbatches == 1 ? "" : "es")},
            {"recompute", plan["recompute"].text()},
            {"threads per rank", fmt::format("{}", plan["threads_per_rank"].count())}};
  if (plan.has("shard_ranks")) r.shard_ranks = plan["shard_ranks"].count(kMaxRecorded);
  if (r.schedule.ranks > 1)
    r.plan.insert(r.plan.begin() + 1, {"schedule", fmt::format("{}, {} stages", r.schedule.name, r.schedule.stages)});
}

void read_about(Record& r, std::string_view text, const std::string& file) {
  const Json json = parse_json(text, file);
  const Value root(json, file);
  if (root["format"].count() != 1) root["format"].refuse("format 1");
  r.written = root["written"].text();
  r.steps = root["steps"].count();
  r.recorded = root["kept"].text();
  r.clock = root["clock"].text();
  r.model = describe_model(root["model"]);
  read_plan(r, root["plan"], file);
  r.cores = root["processors"]["cores"].count();
  r.threads = root["processors"]["threads"].count();
  r.shared = root["processors"]["shared"].truth();
  for (const Value& v : root["ranks"].list()) {
    Rank rank;
    rank.name = v["name"].text();
    rank.peak = v["peak_bytes"].count(kMaxBytes);
    rank.peaks = categories(v["peaks"]);
    for (const auto& [axis, at] : v["at"].members()) rank.at.emplace_back(axis, at.count(kMaxRecorded));
    r.ranks.push_back(std::move(rank));
  }
  if (std::ssize(r.ranks) != root["plan"]["ranks"].count())
    root["plan"]["ranks"].refuse(fmt::format("{} ranks, the number of listed ranks", r.ranks.size()));
  for (const Value& v : root["sent"].list())
    r.sent.push_back(
        {v["axis"].text(), v["operation"].text(), v["calls"].count(kMaxBytes), v["bytes"].count(kMaxBytes)});
}

bool names_action(const Event& e) {
  for (int what = 0; what < kPassKinds; ++what)
    if (Action{static_cast<PassKind>(what), e.stage, e.microbatch}.str() == e.name) return true;
  return false;
}

Event read_event(const Value& v, const std::string& track, const Schedule& schedule) {
  const Value args = v["args"];
  Event e{.track = track, .name = v["name"].text(), .axis = {}, .operation = {}};
  e.begin = v["ts"].number() / 1e3;
  e.end = e.begin + v["dur"].number() / 1e3;
  if (!(e.begin >= 0 && e.end >= e.begin && e.end < kMaxTime)) v.refuse("an interval with 0 <= begin <= end");
  e.step = args["step"].count();
  if (args.has("stage")) {
    e.stage = static_cast<int>(args["stage"].count(schedule.stages - 1));
    e.microbatch = static_cast<int>(args["microbatch"].count(schedule.microbatches - 1));
    e.cpu_s = args["processor"].number() / 1e3;
    if (!names_action(e)) v.refuse("the name of an action with this stage and micro-batch");
    if (!(e.cpu_s >= 0 && e.cpu_s < kMaxTime)) v.refuse("a CPU time of at least 0");
  }
  if (args.has("operation")) {
    e.axis = args["axis"].text();
    e.operation = args["operation"].text();
    e.bytes = args["bytes"].count();
    e.sent = args["sent"].count();
  }
  return e;
}

void read_trace(Record& r, std::string_view text, const std::string& file) {
  const Json json = parse_json(text, file);
  std::map<std::pair<int64_t, int64_t>, std::string> tracks;
  for (const Value& v : Value(json, file)["traceEvents"].list()) {
    const int64_t pid = v["pid"].count(std::ssize(r.ranks) - 1), tid = v["tid"].count();
    Rank& rank = r.ranks[static_cast<size_t>(pid)];
    const std::string phase = v["ph"].text();
    if (phase == "M" && v["name"].text() == "thread_name") {
      tracks[{pid, tid}] = v["args"]["name"].text();
    } else if (phase == "X") {
      const auto track = tracks.find({pid, tid});
      if (track == tracks.end()) v.refuse("an event on a named track");
      rank.events.push_back(read_event(v, track->second, r.schedule));
      r.waits_noted = r.waits_noted || track->second == "waiting";
    } else if (phase == "C") {
      rank.memory.push_back({v["ts"].number() / 1e3, categories(v["args"])});
    }
  }
}

void read_experts(Record& r, const Value& v) {
  constexpr int64_t kMaxChoices = int64_t{1} << 38, kMaxExperts = 10000,
                    kMaxLayers = 1024;  // so that sums do not overflow
  r.experts.load = {.dropped = v["dropped"].count(kMaxChoices * kMaxLayers)};
  r.experts.ranks = std::max<int64_t>(1, v["ranks"].count());
  for (const Value& layer : v["load"].list()) {
    std::vector<int64_t>& rows = r.experts.load.rows.emplace_back();
    for (const Value& choices : layer.list()) rows.push_back(choices.count(kMaxChoices));
    if (rows.empty() || std::ssize(rows) > kMaxExperts || std::ssize(rows) % r.experts.ranks != 0)
      layer.refuse("the loads of at most 10000 experts; their number must be a multiple of the number of ranks");
    if (std::ssize(r.experts.load.rows) > kMaxLayers) v["load"].refuse("at most 1024 layers");
  }
}

// Without a trace, the summary is the only source of bytes and memory.
void read_summary(Record& r, const Value& v) {
  r.ranks.clear();
  r.sent.clear();
  if (v.has("peak_bytes"))
    for (const Value& peak : v["peak_bytes"].list()) {
      Rank& rank = r.ranks.emplace_back();
      rank.name = fmt::format("rank {}", r.ranks.size() - 1);
      rank.peak = peak.count(kMaxBytes);
    }
  if (v.has("sent_bytes"))
    for (const auto& [axis, operations] : v["sent_bytes"].members())
      for (const auto& [operation, bytes] : operations.members())
        r.sent.push_back({axis, operation, 0, bytes.count(kMaxBytes)});
}

void read_metrics(Record& r, std::string_view text, const std::string& file) {
  std::vector<double> throughputs, lengths;
  // A kill may truncate the last line.
  for (size_t at = 0, end; (end = text.find('\n', at)) != std::string_view::npos; at = end + 1) {
    const Json json = parse_json(text.substr(at, end - at), file);
    const Value v(json, file);
    const std::string event = v["event"].text();
    if (event == "step") {
      r.losses.push_back({v["step"].count(), v["loss"].number()});
      throughputs.push_back(v["tokens_per_s"].number());
      if (v.has("step_ms")) lengths.push_back(v["step_ms"].number());
    } else if (event == "eval") {
      r.validations.push_back({v["step"].count(), v["val_loss"].number()});
    } else if (event == "summary") {
      if (!r.traced) read_summary(r, v);
      r.experts = {};
      if (v.has("experts")) read_experts(r, v["experts"]);
      // In the resolved plan, `--ranks 2` and `--dp 2` are equal.
      if (v.has("plan"))
        for (const auto& [key, value] : json.at("plan").items())
          if (key != "strategy") r.options[std::regex_replace(key, std::regex("_"), "-")] = value.dump();
    }
  }
  r.tokens_per_s = median_throughput(std::move(throughputs));
  r.step_ms = median_throughput(lengths);
  if (lengths.size() > kWarmupSteps) lengths.erase(lengths.begin(), lengths.begin() + kWarmupSteps);
  std::ranges::sort(lengths);
  if (!lengths.empty()) r.quick_ms = lengths[lengths.size() / 4], r.slow_ms = lengths[3 * lengths.size() / 4];
}

std::vector<size_t> pipeline_ranks(const Record& record) {
  std::vector<size_t> out(static_cast<size_t>(record.schedule.ranks), record.ranks.size());
  for (size_t r = 0; r < record.ranks.size(); ++r) {
    int64_t pp = 0;
    bool alike = true;
    for (const auto& [axis, at] : record.ranks[r].at)
      if (axis == "pp")
        pp = at;
      else
        alike = alike && at == 0;
    if (alike && pp < std::ssize(out)) out[static_cast<size_t>(pp)] = r;
  }
  return out;
}

size_t passes_in(const std::vector<TimedAction>& list) {
  return static_cast<size_t>(std::ranges::count_if(list, [](const TimedAction& t) { return !t.action.is_message(); }));
}

struct Span {
  double begin = 0, end = 0;
};
using Spans = std::vector<Span>;

// Sorted and disjoint.
Spans merged(Spans spans) {
  std::ranges::sort(spans, {}, &Span::begin);
  Spans out;
  for (const Span& s : spans) {
    if (s.end <= s.begin) continue;
    if (!out.empty() && s.begin <= out.back().end)
      out.back().end = std::max(out.back().end, s.end);
    else
      out.push_back(s);
  }
  return out;
}

double length(const Spans& spans) {
  double sum = 0;
  for (const Span& s : spans) sum += s.end - s.begin;
  return sum;
}

// The length of the intersection of merged lists.
double common(const Spans& a, const Spans& b) {
  double sum = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    sum += std::max(0.0, std::min(a[i].end, b[j].end) - std::max(a[i].begin, b[j].begin));
    a[i].end < b[j].end ? ++i : ++j;
  }
  return sum;
}

int64_t coordinate(const Rank& rank, const std::string& axis) {
  const auto found = std::ranges::find(rank.at, axis, &std::pair<std::string, int64_t>::first);
  return found == rank.at.end() ? 0 : found->second;
}

// Sub-axes of the data axis: groups of `size` adjacent ranks, and the ranks at the same position in these groups.
struct Cut {
  const char *neighbours, *across;
  int64_t size;
};

// Names a rank's group by its coordinates on all other axes.
std::string axis_group(const Record& r, const Rank& rank, const std::string& axis) {
  if (axis == "world") return axis;
  std::string along = "+" + (axis == "tied" ? "pp" : axis) + "+", out = axis;
  for (const Cut& cut : {Cut{"ep", "edp", r.experts.ranks}, Cut{"dp.shard", "dp.replicate", r.shard_ranks}}) {
    if (cut.size < 1 || (axis != cut.neighbours && axis != cut.across)) continue;
    int64_t cp = 1;
    for (const Rank& other : r.ranks) cp = std::max(cp, coordinate(other, "cp") + 1);
    const int64_t at = coordinate(rank, "dp") * cp + coordinate(rank, "cp");
    out += " " + std::to_string(axis == cut.neighbours ? at / cut.size : at % cut.size);
    if (axis == "edp" && r.shard_ranks > 0) out += " of " + std::to_string(at / r.shard_ranks);
    along = "+dp+cp+";
  }
  for (const auto& [name, at] : rank.at)
    if (along.find("+" + name + "+") == std::string::npos) out += " " + name + std::to_string(at);
  return out;
}

bool is_point_to_point(const Event& e) { return e.operation == "send" || e.operation == "recv"; }

// The time at which all data that a rank needs were available, if known, otherwise the rank's own arrival. A
// communication event begins at its rank's arrival; no data can be transferred before the last arrival.
class Arrivals {
 public:
  Arrivals(const Record& r, const StepSpan& step) : record_(r) {
    for (const Rank& rank : r.ranks)
      for (const Event& e : rank.events) {
        if (e.step != step.step || e.operation.empty() || e.operation == "recv") continue;
        const std::string group = axis_group(r, rank, e.axis);
        if (e.stage >= 0)
          sent_[{group, Action::parse(e.name)}] = e.begin;
        else
          lists_[list_name(group, e)][&rank].push_back(e.begin);
      }
    for (auto& [name, ranks] : lists_)
      for (auto& [rank, times] : ranks) std::ranges::sort(times);
  }

  // `n`: index of the operation in the rank's list of collectives of one group, or of messages outside a pipeline.
  double of(const Rank& rank, const Event& e, size_t n) const {
    const std::string group = axis_group(record_, rank, e.axis);
    if (e.operation == "send") return e.begin;
    if (e.stage >= 0) {
      const auto found = sent_.find({group, sent_as(Action::parse(e.name))});
      return found == sent_.end() ? e.begin : found->second;
    }
    const auto list = lists_.find(list_name(group, e));
    if (list == lists_.end()) return e.begin;
    double last = e.begin;
    for (const auto& [other, times] : list->second) {
      if (times.size() != list->second.begin()->second.size() || n >= times.size()) return e.begin;
      last = std::max(last, times[n]);
    }
    return last;
  }

  static std::string list_name(const std::string& group, const Event& e) {
    return group + (is_point_to_point(e) ? " messages" : "");
  }

 private:
  const Record& record_;
  std::map<std::pair<std::string, Action>, double> sent_;
  std::map<std::string, std::map<const Rank*, std::vector<double>>> lists_;
};

Exposure rank_exposure(const Rank& rank, const StepSpan& step, const Arrivals& arrivals) {
  Spans waits, moving, before_last;  // stalls; communication; communication before the last rank arrived
  std::vector<const Event*> events;
  for (const Event& e : rank.events) {
    if (e.step != step.step) continue;
    if (e.track == "waiting") waits.push_back({e.begin, e.end});
    if (!e.operation.empty()) events.push_back(&e);
  }
  std::ranges::sort(events, {}, &Event::begin);
  std::map<std::string, size_t> counts;
  for (const Event* e : events) {
    const std::string list = Arrivals::list_name(e->axis, *e) + (e->operation == "send" ? " sent" : "");
    const size_t n = e->stage >= 0 ? 0 : counts[list]++;
    moving.push_back({e->begin, e->end});
    before_last.push_back({e->begin, std::min(e->end, arrivals.of(rank, *e, n))});
  }
  waits = merged(std::move(waits)), moving = merged(std::move(moving)), before_last = merged(std::move(before_last));
  Exposure out{.step = step.end - step.begin};
  out.waiting = common(waits, before_last);
  out.transfer = length(waits) - out.waiting;
  out.hidden = length(moving) - common(waits, moving);
  return out;
}

}  // namespace

Record parse_record(const Files& files, const std::string& name) {
  Record r;
  r.traced = true;
  read_about(r, files.report, name + "report.json");
  read_trace(r, files.trace, name + "trace.json");
  read_metrics(r, files.metrics, name + "metrics.jsonl");
  return r;
}

Record parse_metrics(std::string_view metrics, const std::string& name) {
  Record r;
  read_metrics(r, metrics, name + "metrics.jsonl");
  r.steps = r.losses.empty() ? 0 : r.losses.back().step;
  return r;
}

Record read_record(const fs::path& run, bool may_lack_trace) {
  if (!is_there(run)) bad_input("{}: no such directory; expected a run directory", run.string());
  const std::string directory = (run / "").string();
  Record r;
  if (may_lack_trace && !(is_there(run / "report.json") && is_there(run / "trace.json"))) {
    if (!is_there(run / "metrics.jsonl")) bad_input("{}: not a run directory: metrics.jsonl is missing", run.string());
    r = parse_metrics(read_file(run / "metrics.jsonl"), directory);
  } else {
    for (const char* file : {"report.json", "trace.json"})
      if (!is_there(run / file)) bad_input("{}: {} is missing; train with --trace to record it", run.string(), file);
    const std::string report = read_file(run / "report.json"), trace = read_file(run / "trace.json"),
                      metrics = read_file(run / "metrics.jsonl");
    r = parse_record({report, trace, metrics}, directory);
  }
  r.label = run.lexically_normal().string();
  if (!is_there(run / "config.toml")) return r;
  for (const std::string& line : split(read_file(run / "config.toml"), '\n'))
    if (const size_t at = line.find(" = "); at != std::string::npos && line[0] != '#')
      r.options.try_emplace(line.substr(0, at), line.substr(at + 3));
  return r;
}

StepSpan median_step(const Record& record) {
  std::map<int64_t, StepSpan> steps;
  for (const Rank& rank : record.ranks)
    for (const Event& e : rank.events) {
      if (e.track != "step") continue;
      StepSpan& s = steps.try_emplace(e.step, StepSpan{e.step, e.begin, e.end}).first->second;
      s.begin = std::min(s.begin, e.begin);
      s.end = std::max(s.end, e.end);
    }
  std::vector<StepSpan> all;
  for (const auto& [step, span] : steps) all.push_back(span);
  if (all.empty()) return {};
  const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
  std::nth_element(all.begin(), middle, all.end(),
                   [](const StepSpan& a, const StepSpan& b) { return a.end - a.begin < b.end - b.begin; });
  return *middle;
}

std::vector<SentInStep> sent_in_step(const Record& record, const StepSpan& step) {
  std::map<std::pair<std::string, std::string>, SentInStep> rows;
  for (const Rank& rank : record.ranks) {
    std::map<SentInStep*, int64_t> own;
    for (const Event& e : rank.events) {
      if (e.step != step.step || e.operation.empty()) continue;
      SentInStep& row = rows.try_emplace({e.axis, e.operation}, SentInStep{{e.axis, e.operation}}).first->second;
      ++row.calls;
      row.bytes += e.sent;
      row.busiest = std::max(row.busiest, own[&row] += e.sent);
      row.ms += (e.end - e.begin) / static_cast<double>(record.ranks.size());
    }
  }
  std::vector<SentInStep> out;
  for (const auto& [name, row] : rows) out.push_back(row);
  return out;
}

std::optional<MeasuredPipeline> measure_pipeline(const Record& record, const StepSpan& step) {
  const Schedule& s = record.schedule;
  if (s.ranks < 2) return std::nullopt;
  MeasuredPipeline p;
  p.equal = simulate(s);
  p.formula = bubble_formula(s);
  TimedLists recorded, lengths;  // CPU times of passes
  size_t found = 0, planned = 0;
  for (const size_t rank : pipeline_ranks(record)) {
    if (rank == record.ranks.size()) return std::nullopt;
    std::vector<TimedAction>&list = recorded.emplace_back(), &cpu_times = lengths.emplace_back();
    for (const Event& e : record.ranks[rank].events) {
      if (e.step != step.step || e.stage < 0) continue;
      const Action action = Action::parse(e.name);
      list.push_back({action, e.begin, e.end});
      if (!action.is_message()) cpu_times.push_back({action, 0, e.cpu_s});
    }
    if (list.empty()) return std::nullopt;
    found += passes_in(list);
  }
  for (const auto& list : p.equal.actions) planned += passes_in(list);
  if (found != planned) return std::nullopt;
  p.times = simulate_times(s, record.shared ? lengths : recorded);
  p.replayed = simulate(s, p.times);
  p.measured = as_measured(s, std::move(recorded));
  return p;
}

std::optional<std::vector<Exposure>> exposures(const Record& r, const StepSpan& step) {
  if (!r.waits_noted || step.step == 0) return std::nullopt;
  const Arrivals arrivals(r, step);
  std::vector<Exposure> out;
  for (const Rank& rank : r.ranks) out.push_back(rank_exposure(rank, step, arrivals));
  return out;
}

Overlap measure_overlap(const Record& r, const StepSpan& step, const std::string& axis, const std::string& operation) {
  Overlap out;
  for (const Rank& rank : r.ranks) {
    Spans waits, moving;
    for (const Event& e : rank.events) {
      if (e.step != step.step) continue;
      if (e.track == "waiting") waits.push_back({e.begin, e.end});
      if (e.axis == axis && e.operation == operation) moving.push_back({e.begin, e.end});
    }
    moving = merged(std::move(moving));
    out.all += length(moving) / static_cast<double>(r.ranks.size());
    out.exposed += common(merged(std::move(waits)), moving) / static_cast<double>(r.ranks.size());
  }
  return out;
}

Exposure mean(const std::vector<Exposure>& all) {
  Exposure out;
  const double n = std::max<double>(1, static_cast<double>(all.size()));
  for (const Exposure& e : all) {
    out.step += e.step / n;
    out.waiting += e.waiting / n;
    out.transfer += e.transfer / n;
    out.hidden += e.hidden / n;
  }
  return out;
}

}  // namespace tessera::report
