// Reading what `train --trace` wrote, believing none of it before it was looked at.
#include "app/report/record.h"

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "app/train/output.h"
#include "data/files.h"
#include "data/json.h"
#include "tensor/error.h"

namespace tessera::report {
namespace fs = std::filesystem;
namespace {

using Json = nlohmann::json;
constexpr int64_t kMostRanks = 1 << 16;
constexpr double kMostNumber = 1e15;
constexpr double kMostTime = 1e12;
constexpr int64_t kMostBytes = int64_t{1} << 52;  // and calls: sums of many stay within 64 bits

// A value of a file, with the file's name for what is wrong with it.
class Value {
 public:
  Value(const Json& json, const std::string& file) : json_(json), file_(file) {}

  [[noreturn]] void refuse(const std::string& expected) const {
    throw InputError(fmt::format("{}: expected {}, found {}", file_, expected, json_.dump().substr(0, 60)));
  }
  Value operator[](const char* key) const {
    if (!json_.is_object() || !json_.contains(key)) refuse(fmt::format("an object with '{}'", key));
    return {json_.at(key), file_};
  }
  bool has(const char* key) const { return json_.is_object() && json_.contains(key); }
  int64_t count(int64_t most = int64_t{1} << 62) const {
    const std::optional<int64_t> n = natural(json_);
    if (!n || *n > most) refuse(fmt::format("a whole number of at most {}", most));
    return *n;
  }
  double number() const {
    if (!json_.is_number() || std::abs(json_.get<double>()) > kMostNumber) refuse("a number that a run can have");
    return json_.get<double>();
  }
  bool truth() const {
    if (!json_.is_boolean()) refuse("true or false");
    return json_.get<bool>();
  }
  std::string text() const {
    if (!json_.is_string()) refuse("a text");
    return json_.get<std::string>();
  }
  std::vector<Value> list() const {
    if (!json_.is_array()) refuse("a list");
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
    out[c] = value[std::string(name_of(static_cast<Category>(c))).c_str()].count(kMostBytes);
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
    axes += fmt::format("{}{} {}", axes.empty() ? "" : " x ", axis, plan["axes"][axis].count(kMostRanks));
  const Value schedule = plan["schedule"];
  r.schedule = parse_schedule(schedule["text"].text(), file);
  r.schedule.name = schedule["name"].text();
  r.plan = {{"ranks", fmt::format("{} ({})", plan["ranks"].count(kMostRanks), axes)},
            {"data axis", plan["strategy"].text()},
            {"sums", plan["all_reduce"].text()},
            {"backend", plan["backend"].text()},
            {"batch", fmt::format("{} sequences, {} micro-batches per data rank", plan["batch"].count(),
                                  r.schedule.microbatches)},
            {"recompute", plan["recompute"].text()},
            {"threads per rank", fmt::format("{}", plan["threads_per_rank"].count())}};
  if (plan.has("shard_ranks")) r.shard_ranks = plan["shard_ranks"].count(kMostRanks);
  if (r.schedule.ranks > 1)
    r.plan.insert(r.plan.begin() + 1, {"schedule", fmt::format("{}, {} stages", r.schedule.name, r.schedule.stages)});
}

void read_about(Record& r, std::string_view text, const std::string& file) {
  const Json json = parse_json(text, file);
  const Value root(json, file);
  if (root["format"].count() != 1) root["format"].refuse("format 1");
  r.written = root["written"].text();
  r.steps = root["steps"].count();
  r.kept = root["kept"].text();
  r.clock = root["clock"].text();
  r.model = describe_model(root["model"]);
  read_plan(r, root["plan"], file);
  r.cores = root["processors"]["cores"].count();
  r.threads = root["processors"]["threads"].count();
  r.shared = root["processors"]["shared"].truth();
  for (const Value& v : root["ranks"].list()) {
    Rank rank;
    rank.name = v["name"].text();
    rank.peak = v["peak_bytes"].count(kMostBytes);
    rank.peaks = categories(v["peaks"]);
    for (const auto& [axis, at] : v["at"].members()) rank.at.emplace_back(axis, at.count(kMostRanks));
    r.ranks.push_back(std::move(rank));
  }
  if (std::ssize(r.ranks) != root["plan"]["ranks"].count())
    root["plan"]["ranks"].refuse(fmt::format("{} ranks, as many as are listed", r.ranks.size()));
  for (const Value& v : root["sent"].list())
    r.sent.push_back(
        {v["axis"].text(), v["operation"].text(), v["calls"].count(kMostBytes), v["bytes"].count(kMostBytes)});
}

bool names_action(const Event& e) {
  for (int what = 0; what < kDos; ++what)
    if (Action{static_cast<Do>(what), e.stage, e.microbatch}.str() == e.name) return true;
  return false;
}

Event read_event(const Value& v, const std::string& track, const Schedule& schedule) {
  const Value args = v["args"];
  Event e{.track = track, .name = v["name"].text(), .axis = {}, .operation = {}};
  e.begin = v["ts"].number() / 1e3;
  e.end = e.begin + v["dur"].number() / 1e3;
  if (!(e.begin >= 0 && e.end >= e.begin && e.end < kMostTime))
    v.refuse("a time of 0 or more that ends after it began");
  e.step = args["step"].count();
  if (args.has("stage")) {
    e.stage = static_cast<int>(args["stage"].count(schedule.stages - 1));
    e.microbatch = static_cast<int>(args["microbatch"].count(schedule.microbatches - 1));
    e.processor = args["processor"].number() / 1e3;
    if (!names_action(e)) v.refuse("the name of an action of its stage and micro-batch");
    if (!(e.processor >= 0 && e.processor < kMostTime)) v.refuse("a processor's time of 0 or more");
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
      if (track == tracks.end()) v.refuse("an event on a track that was named before");
      rank.events.push_back(read_event(v, track->second, r.schedule));
      r.waits_noted = r.waits_noted || track->second == "waiting";
    } else if (phase == "C") {
      rank.memory.push_back({v["ts"].number() / 1e3, categories(v["args"])});
    }
  }
}

void read_experts(Record& r, const Value& v) {
  constexpr int64_t kMostChoices = int64_t{1} << 38, kMostExperts = 10000, kMostLayers = 1024;  // so that sums fit
  r.experts.load = {.dropped = v["dropped"].count(kMostChoices * kMostLayers)};
  r.experts.ranks = std::max<int64_t>(1, v["ranks"].count());
  for (const Value& layer : v["load"].list()) {
    std::vector<int64_t>& rows = r.experts.load.rows.emplace_back();
    for (const Value& choices : layer.list()) rows.push_back(choices.count(kMostChoices));
    if (rows.empty() || std::ssize(rows) > kMostExperts || std::ssize(rows) % r.experts.ranks != 0)
      layer.refuse("the choices of up to 10000 experts that the ranks share evenly");
    if (std::ssize(r.experts.load.rows) > kMostLayers) v["load"].refuse("up to 1024 layers");
  }
}

// Of the run's last line: where there is no trace, all that is known of bytes and memory.
void read_summary(Record& r, const Value& v) {
  r.ranks.clear();
  r.sent.clear();
  if (v.has("peak_bytes"))
    for (const Value& peak : v["peak_bytes"].list()) {
      Rank& rank = r.ranks.emplace_back();
      rank.name = fmt::format("rank {}", r.ranks.size() - 1);
      rank.peak = peak.count(kMostBytes);
    }
  if (v.has("sent_bytes"))
    for (const auto& [axis, operations] : v["sent_bytes"].members())
      for (const auto& [operation, bytes] : operations.members())
        r.sent.push_back({axis, operation, 0, bytes.count(kMostBytes)});
}

void read_metrics(Record& r, std::string_view text, const std::string& file) {
  std::vector<double> rates, lengths;
  // A last line without its end was cut by a kill.
  for (size_t at = 0, end; (end = text.find('\n', at)) != std::string_view::npos; at = end + 1) {
    const Json json = parse_json(text.substr(at, end - at), file);
    const Value v(json, file);
    const std::string event = v["event"].text();
    if (event == "step") {
      r.losses.push_back({v["step"].count(), v["loss"].number()});
      rates.push_back(v["tokens_per_s"].number());
      if (v.has("step_ms")) lengths.push_back(v["step_ms"].number());
    } else if (event == "eval") {
      r.validations.push_back({v["step"].count(), v["val_loss"].number()});
    } else if (event == "summary") {
      if (!r.traced) read_summary(r, v);
      r.experts = {};
      if (v.has("experts")) read_experts(r, v["experts"]);
    }
  }
  r.tokens_per_s = median_rate(std::move(rates));
  r.step_ms = median_rate(std::move(lengths));
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

Record read_any_record(const fs::path& run) {
  std::error_code error;
  const bool traced = fs::exists(run / "report.json", error) && fs::exists(run / "trace.json", error);
  if (!traced && fs::exists(run, error) && !fs::exists(run / "metrics.jsonl", error))
    throw InputError(fmt::format("{}: there is no metrics.jsonl in it; expected a run directory", run.string()));
  Record r = traced || !fs::exists(run, error) ? read_record(run)
                                               : parse_metrics(read_file(run / "metrics.jsonl"), (run / "").string());
  r.label = run.lexically_normal().string();
  return r;
}

Record read_record(const fs::path& run) {
  std::error_code error;
  if (!fs::exists(run, error))
    throw InputError(fmt::format("{}: no such directory; expected a run directory", run.string()));
  for (const char* file : {"report.json", "trace.json"})
    if (!fs::exists(run / file, error))
      throw InputError(fmt::format("{}: there is no {} in it; train with --trace to have one", run.string(), file));
  const std::string report = read_file(run / "report.json"), trace = read_file(run / "trace.json"),
                    metrics = read_file(run / "metrics.jsonl");
  return parse_record({report, trace, metrics}, (run / "").string());
}

}  // namespace tessera::report
