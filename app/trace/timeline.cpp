// Logs are sent as CBOR arrays of 8-byte integers.
#include "app/trace/timeline.h"

#include <fmt/chrono.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tensor/cpu/vectorize.h"

namespace tessera {

using Cbor = nlohmann::json;

static auto fields(TraceEvent& e) {
  return std::tie(e.what, e.axis, e.bytes, e.requested, e.begin, e.end, e.sent, e.kind, e.cpu_s);
}
static auto fields(TraceStep& s) { return std::tie(s.step, s.begin, s.end); }
static auto fields(TraceMemory& m) { return std::tie(m.time, m.live); }
static auto fields(RankLog& l) {
  return std::tie(l.host, l.origin, l.clock_sync, l.cores, l.threads, l.peaks, l.events, l.steps, l.memory);
}
template <class T>
static auto to_json(Cbor& list, T value) -> decltype(void(fields(value))) {
  std::apply([&](const auto&... field) { list = Cbor::array({field...}); }, fields(value));
}
template <class T>
static auto from_json(const Cbor& list, T& value) -> decltype(void(fields(value))) {
  size_t at = 0;
  std::apply([&](auto&... field) { (list.at(at++).get_to(field), ...); }, fields(value));
}

namespace {

constexpr int kTag = 7100;

std::vector<int> cores_here() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> out;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return out;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &set)) out.push_back(core);
  return out;
}

void send_bytes(Communicator& world, const std::vector<uint8_t>& bytes, const ArenaPtr& arena) {
  const auto size = std::ssize(bytes);
  world.send(Tensor::of<int64_t>(std::vector<int64_t>{size}, {1}, arena), 0, kTag);
  const Tensor packed = Tensor::zeros({(size + 7) / 8}, DType::int64, arena);
  std::memcpy(packed.raw(), bytes.data(), bytes.size());
  world.send(packed, 0, kTag);
}

std::vector<uint8_t> recv_bytes(Communicator& world, int from, const ArenaPtr& arena) {
  const Tensor size = Tensor::empty({1}, DType::int64, arena);
  world.recv(size, from, kTag);
  std::vector<uint8_t> bytes(static_cast<size_t>(size.item<int64_t>()));
  const Tensor packed = Tensor::empty({(size.item<int64_t>() + 7) / 8}, DType::int64, arena);
  world.recv(packed, from, kTag);
  std::memcpy(bytes.data(), packed.raw(), bytes.size());
  return bytes;
}

// The logs of all ranks in Chrome's trace event format, for ui.perfetto.dev and chrome://tracing:
//
//   process = rank         "rank 3 (pp 1, dp 0, tp 1)"
//   thread = track         events of a track do not overlap; "waiting": the rank's thread stalls in communication;
//                          "collective AXIS" for each axis
//   "X" event              an action of the pipeline ("2F0": stage 2, micro-batch 0), a communication, a phase
//   "C" event              bytes held by the rank, by category

using Ordered = nlohmann::ordered_json;

// In display order; tracks of mesh axes follow.
constexpr const char* kTracks[] = {"step", "forward", "backward", "input gradient", "weight gradient",
                                   "send", "receive", "update",   "waiting"};

std::string track_name(const TraceEvent& e) {
  if (e.kind == TraceKind::phase) return "update";
  if (e.kind == TraceKind::wait) return "waiting";
  if (e.kind == TraceKind::communication) {
    if (e.what == "send") return "send";
    return e.what == "recv" ? "receive" : "collective " + e.axis;
  }
  constexpr std::array<const char*, kPassKinds> tracks = {"forward", "backward", "input gradient", "weight gradient",
                                                          "send",    "receive",  "send",           "receive"};
  return tracks[static_cast<size_t>(Action::parse(e.what).what)];
}

Ordered by_category(const std::array<int64_t, kCategories>& bytes) {
  Ordered out = Ordered::object();
  for (size_t c = 0; c < bytes.size(); ++c) out[std::string(to_string(static_cast<Category>(c)))] = bytes[c];
  return out;
}

double microseconds(double seconds) { return std::round(seconds * 1e9) / 1e3; }

class RankTimeline {
 public:
  RankTimeline(const RankLog& log, int rank, double add) : log_(log), rank_(rank), add_(add) {}

  void write(std::vector<Ordered>& out, const std::string& name) {
    meta(out, "process_name", 0, {{"name", name}});
    meta(out, "process_sort_index", 0, {{"sort_index", rank_}});
    std::vector<Ordered> events;
    for (const TraceStep& s : log_.steps)
      add(events, {.what = "step " + std::to_string(s.step), .axis = {}, .begin = s.begin, .end = s.end}, "step", {});
    add_events(events);
    for (const auto& [track, number] : numbers_) meta(out, "thread_name", number, {{"name", track}});
    for (const auto& [track, number] : numbers_) meta(out, "thread_sort_index", number, {{"sort_index", number}});
    out.insert(out.end(), events.begin(), events.end());
    add_memory(out);
  }

 private:
  void meta(std::vector<Ordered>& out, const char* what, int tid, const Ordered& args) const {
    out.push_back({{"ph", "M"}, {"name", what}, {"pid", rank_}, {"tid", tid}, {"args", args}});
  }

  // Axis tracks follow the fixed tracks, in order of appearance.
  int track_number(const std::string& track) {
    const auto* const found = std::find(std::begin(kTracks), std::end(kTracks), track);
    const bool is_axis = found == std::end(kTracks);
    const auto number = static_cast<int>(found - std::begin(kTracks)) + (is_axis ? axes_ : 0) + 1;
    const auto [at, is_new] = numbers_.try_emplace(track, number);
    if (is_new && is_axis) ++axes_;
    return at->second;
  }

  int64_t step_at(double time) const {
    for (const TraceStep& s : log_.steps)
      if (time >= s.begin && time <= s.end) return s.step;
    return 0;
  }

  void add(std::vector<Ordered>& out, const TraceEvent& e, const std::string& track, Ordered args) {
    args["step"] = step_at(e.begin);
    out.push_back({{"ph", "X"},
                   {"name", e.what},
                   {"cat", track},
                   {"pid", rank_},
                   {"tid", track_number(track)},
                   {"ts", microseconds(add_ + e.begin)},
                   {"dur", microseconds(e.end - e.begin)},
                   {"args", std::move(args)}});
  }

  // A pipeline message is logged as an action and as a communication, which become one event.
  void add_events(std::vector<Ordered>& out) {
    const std::vector<TraceEvent>& events = log_.events;
    std::vector<const TraceEvent*> inside(events.size(), nullptr);
    std::vector<bool> written(events.size(), false);
    std::optional<size_t> message;
    for (size_t i = 0; i < events.size(); ++i) {
      const TraceEvent& e = events[i];
      if (e.kind == TraceKind::communication && (e.what == "send" || e.what == "recv")) message = i;
      if (e.kind != TraceKind::action || !Action::parse(e.what).is_message()) continue;
      if (!message || events[*message].begin < e.begin) continue;
      inside[i] = &events[*message];
      written[*message] = true;
      message.reset();
    }
    for (size_t i = 0; i < events.size(); ++i)
      if (!written[i]) add(out, events[i], track_name(events[i]), arguments(events[i], inside[i]));
  }

  static Ordered arguments(const TraceEvent& e, const TraceEvent* message) {
    Ordered args = Ordered::object();
    if (e.kind == TraceKind::action) {
      const Action action = Action::parse(e.what);
      args["stage"] = action.stage;
      args["microbatch"] = action.microbatch;
      args["processor"] = microseconds(e.cpu_s);
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

  void add_memory(std::vector<Ordered>& out) const {
    const TraceMemory* before = nullptr;
    for (const TraceMemory& m : log_.memory) {
      if (before && before->live == m.live && &m != &log_.memory.back()) continue;
      before = &m;
      out.push_back({{"ph", "C"},
                     {"name", "memory"},
                     {"pid", rank_},
                     {"tid", 0},
                     {"ts", microseconds(add_ + m.time)},
                     {"args", by_category(m.live)}});
    }
  }

  const RankLog& log_;
  int rank_;
  double add_;
  int axes_ = 0;
  std::map<std::string, int> numbers_;
};

// One event per line. `names`: processes; `kept`: recorded steps.
std::string timeline_json(const std::vector<RankLog>& logs, const std::vector<std::string>& names,
                          const std::string& recorded) {
  const Alignment clock = align(logs);
  std::vector<Ordered> events;
  for (size_t r = 0; r < logs.size(); ++r)
    RankTimeline(logs[r], static_cast<int>(r), clock.add[r]).write(events, names[r]);
  std::string text =
      "{\"displayTimeUnit\": \"ms\",\n\"otherData\": " +
      Ordered{{"program", "tessera"}, {"kept", recorded}, {"left_out", "events between steps"}, {"clock", clock.text}}
          .dump() +
      ",\n\"traceEvents\": [";
  const char* before = "\n";
  for (const Ordered& e : events) {
    text += before + e.dump();
    before = ",\n";
  }
  return text + "\n]}\n";
}

std::string name_of_rank(const Mesh& mesh, int rank) {
  return tessera::name_of_rank(mesh.axes(), mesh.coordinates(rank), rank);
}

std::string recorded_steps(const std::vector<TraceStep>& steps, int64_t done) {
  if (steps.empty()) return "no steps";
  return fmt::format("steps {} to {} of {}", steps.front().step, steps.back().step, done);
}

Ordered model_json(const TrainConfig& o, LanguageModel& model) {
  const ModelConfig& c = model.config;
  return {{"name", o.preset},
          {"layers", c.layers},
          {"heads", c.heads},
          {"channels", c.channels},
          {"context", c.context},
          {"vocab", c.vocab},
          {"dtype", value_name(o.optim.dtype)},
          {"parameters", model.parameter_count()}};
}

Ordered plan_json(const TrainCall& call, TrainState& train) {
  const TrainConfig& o = call.command.config;
  const Schedule& s = train.part().runtime().schedule();
  Ordered axes = Ordered::object();
  for (const MeshAxis& a : train.groups.mesh.axes()) axes[a.name] = a.size;
  return {
      {"ranks", train.groups.world.size()},
      {"axes", axes},
      {"strategy", train.strategy().name()},
      {"shard_ranks", train.job.plan.shard_ranks},
      {"backend", value_name(train.job.plan.backend)},
      {"all_reduce", value_name(o.plan.all_reduce)},
      {"recompute", value_name(o.plan.recompute)},
      {"batch", o.optim.batch},
      {"tokens_per_step", tokens_per_step(call.command.config, call.sequences)},
      {"threads_per_rank", cpu::threads()},
      {"schedule", {{"name", s.name}, {"stages", s.stages}, {"microbatches", s.microbatches}, {"text", to_text(s)}}}};
}

Ordered ranks_json(const std::vector<RankLog>& logs, const Mesh& mesh, const RunUsage& usage) {
  Ordered ranks = Ordered::array();
  for (size_t r = 0; r < logs.size(); ++r) {
    Ordered places = Ordered::object();
    const std::vector<int> at = mesh.coordinates(static_cast<int>(r));
    for (size_t a = 0; a < at.size(); ++a) places[mesh.axes()[a].name] = at[a];
    ranks.push_back({{"name", name_of_rank(mesh, static_cast<int>(r))},
                     {"at", places},
                     {"peak_bytes", usage.peak_bytes[r]},
                     {"peaks", by_category(logs[r].peaks)}});
  }
  return ranks;
}

Ordered report_json(const TrainCall& call, TrainState& train, const RunUsage& usage, const std::vector<RankLog>& logs) {
  const CoreUsage core_usage = count_cores(logs);
  Ordered sent = Ordered::array();
  for (const SentBytes& s : usage.sent)
    sent.push_back({{"axis", s.axis}, {"operation", s.operation}, {"calls", s.calls}, {"bytes", s.bytes}});
  return {
      {"format", 1},
      {"written", fmt::format("{:%Y-%m-%d %H:%M}", fmt::localtime(std::time(nullptr)))},
      {"steps", train.steps_done()},
      {"model", model_json(call.command.config, train.full_model())},
      {"plan", plan_json(call, train)},
      {"processors", {{"cores", core_usage.cores}, {"threads", core_usage.threads}, {"shared", core_usage.shared()}}},
      {"clock", align(logs).text},
      {"kept", recorded_steps(logs[0].steps, train.steps_done())},
      {"ranks", ranks_json(logs, train.groups.mesh, usage)},
      {"sent", sent}};
}

}  // namespace

RankLog describe_rank(const Arena& arena) {
  RankLog log;
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) == 0) log.host = name.data();
  log.cores = cores_here();
  log.threads = cpu::threads();
  for (size_t c = 0; c < log.peaks.size(); ++c) log.peaks[c] = arena.usage(static_cast<Category>(c)).peak;
  return log;
}

std::vector<RankLog> gather_logs(Communicator& world, RankLog own) {
  const ArenaPtr arena = make_arena();
  world.barrier();
  own.clock_sync = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  if (world.rank() != 0) {
    send_bytes(world, Cbor::to_cbor(own), arena);
    return {};
  }
  std::vector<RankLog> logs;
  logs.push_back(std::move(own));
  for (int rank = 1; rank < world.size(); ++rank) logs.push_back(Cbor::from_cbor(recv_bytes(world, rank, arena)));
  return logs;
}

Alignment align(const std::vector<RankLog>& logs) {
  std::map<std::string, double> ahead;  // offset of a host's clock from rank 0's
  for (const RankLog& log : logs) ahead.try_emplace(log.host, log.clock_sync - logs[0].clock_sync);
  ahead[logs[0].host] = 0;
  Alignment a;
  double first = std::numeric_limits<double>::infinity();
  for (const RankLog& log : logs) {
    const double add = log.origin - ahead[log.host];
    a.add.push_back(add);
    for (const TraceEvent& e : log.events) first = std::min(first, add + e.begin);
    for (const TraceStep& s : log.steps) first = std::min(first, add + s.begin);
    for (const TraceMemory& m : log.memory) first = std::min(first, add + m.time);
  }
  for (double& add : a.add) add -= first;
  a.text = ahead.size() == 1 ? "one clock: all ranks ran on one host"
                             : std::to_string(ahead.size()) +
                                   " clocks, one per host, aligned at the final barrier of the run; times of "
                                   "different hosts may differ by the duration of a barrier";
  return a;
}

CoreUsage count_cores(const std::vector<RankLog>& logs) {
  std::map<std::string, std::pair<std::set<int>, int64_t>> hosts;
  for (const RankLog& log : logs) {
    auto& [cores, threads] = hosts[log.host];
    cores.insert(log.cores.begin(), log.cores.end());
    threads += log.threads;
  }
  CoreUsage worst;
  for (const auto& [name, host] : hosts) {
    const CoreUsage here{std::ssize(host.first), host.second};
    if (worst.threads == 0 || here.threads * worst.cores > worst.threads * here.cores) worst = here;
  }
  return worst;
}

std::string name_of_rank(const std::vector<MeshAxis>& axes, const std::vector<int>& at, int64_t rank) {
  std::string places;
  for (size_t a = 0; a < at.size(); ++a)
    if (axes[a].size > 1) places += fmt::format("{}{} {}", places.empty() ? "" : ", ", axes[a].name, at[a]);
  return places.empty() ? fmt::format("rank {}", rank) : fmt::format("rank {} ({})", rank, places);
}

RunTrace::RunTrace(const TrainOptions& o, Communicator& world) : world_(world) {
  if (o.trace) trace_.emplace(static_cast<size_t>(o.trace_steps));
}

RunTrace::~RunTrace() {
  if (trace_) world_.set_trace(nullptr);  // the communicator outlives this object
}

void RunTrace::stop(TrainState& train) {
  if (!trace_) return;
  for (Communicator* axis : train.communicators()) axis->set_trace(nullptr);
  log_ = describe_rank(*train.arena);
  log_.origin = trace_->origin();
  log_.events = trace_->events();
  for (TraceEvent& wait : trace_->waits()) log_.events.push_back(std::move(wait));
  log_.steps = trace_->steps();
  log_.memory = trace_->memory();
}

bool RunTrace::write(const TrainCall& call, TrainState& train, const RunUsage& usage) {
  if (!trace_) return false;
  const std::vector<RankLog> logs = gather_logs(world_, std::move(log_));
  if (world_.rank() != 0) return true;
  std::vector<std::string> names;
  for (int r = 0; r < world_.size(); ++r) names.push_back(name_of_rank(train.groups.mesh, r));
  const std::filesystem::path& path = call.directory.path();
  write_file(path / "trace.json", timeline_json(logs, names, recorded_steps(logs[0].steps, train.steps_done())));
  write_file(path / "report.json", report_json(call, train, usage, logs).dump(1) + "\n");
  return true;
}

}  // namespace tessera
