// Logs travel as CBOR in whole numbers of eight bytes.
#include "app/trace/rank_log.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "tensor/cpu/vectorize.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
constexpr int kTag = 7100;  // of the messages with logs

double clock_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

std::vector<int> cores_here() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> out;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return out;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &set)) out.push_back(core);
  return out;
}

std::vector<uint8_t> pack(const RankLog& log) {
  Json events = Json::array(), steps = Json::array(), memory = Json::array();
  for (const TraceEvent& e : log.events)
    events.push_back(
        {e.what, e.axis, e.bytes, e.requested, e.begin, e.end, e.sent, static_cast<int>(e.kind), e.processor});
  for (const TraceStep& s : log.steps) steps.push_back({s.step, s.begin, s.end});
  for (const TraceMemory& m : log.memory) memory.push_back({m.time, m.live});
  return Json::to_cbor({log.host, log.origin, log.meeting, log.cores, log.threads, log.peaks, events, steps, memory});
}

RankLog unpack(const std::vector<uint8_t>& bytes) {
  const Json j = Json::from_cbor(bytes);
  RankLog log{.host = j[0],
              .origin = j[1],
              .meeting = j[2],
              .cores = j[3].get<std::vector<int>>(),
              .threads = j[4],
              .peaks = j[5],
              .events = {},
              .steps = {},
              .memory = {}};
  for (const Json& e : j[6])
    log.events.push_back({e[0], e[1], e[2], e[3], e[4], e[5], e[6], static_cast<TraceKind>(e[7].get<int>()), e[8]});
  for (const Json& s : j[7]) log.steps.push_back({s[0], s[1], s[2]});
  for (const Json& m : j[8]) log.memory.push_back({m[0], m[1]});
  return log;
}

void send_bytes(Communicator& world, const std::vector<uint8_t>& bytes, const ArenaPtr& arena) {
  const auto size = std::ssize(bytes);
  world.send(Tensor::of<int64_t>(std::vector<int64_t>{size}, {1}, arena), 0, kTag);
  const Tensor words = Tensor::zeros({(size + 7) / 8}, DType::int64, arena);
  std::memcpy(words.raw(), bytes.data(), bytes.size());
  world.send(words, 0, kTag);
}

std::vector<uint8_t> recv_bytes(Communicator& world, int from, const ArenaPtr& arena) {
  const Tensor size = Tensor::empty({1}, DType::int64, arena);
  world.recv(size, from, kTag);
  std::vector<uint8_t> bytes(static_cast<size_t>(size.item<int64_t>()));
  const Tensor words = Tensor::empty({(size.item<int64_t>() + 7) / 8}, DType::int64, arena);
  world.recv(words, from, kTag);
  std::memcpy(bytes.data(), words.raw(), bytes.size());
  return bytes;
}

}  // namespace

RankLog describe_rank(const Arena& arena) {
  RankLog log;
  log.host = host_name();
  log.cores = cores_here();
  log.threads = cpu::threads();
  for (size_t c = 0; c < log.peaks.size(); ++c) log.peaks[c] = arena.usage(static_cast<Category>(c)).peak;
  return log;
}

std::vector<RankLog> gather_logs(Communicator& world, RankLog own) {
  const ArenaPtr arena = make_arena();
  world.barrier();
  own.meeting = clock_now();
  if (world.rank() != 0) {
    send_bytes(world, pack(own), arena);
    return {};
  }
  std::vector<RankLog> logs;
  logs.push_back(std::move(own));
  for (int rank = 1; rank < world.size(); ++rank) logs.push_back(unpack(recv_bytes(world, rank, arena)));
  return logs;
}

Alignment align(const std::vector<RankLog>& logs) {
  std::map<std::string, double> ahead;  // a host's clock, of rank 0's
  for (const RankLog& log : logs) ahead.try_emplace(log.host, log.meeting - logs[0].meeting);
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
  a.words = ahead.size() == 1 ? "one clock: all ranks ran on one host"
                              : std::to_string(ahead.size()) +
                                    " clocks: each host's own, set to one time where all ranks met at the end of the "
                                    "run; times of different hosts may be off by the length of a barrier";
  return a;
}

Processors processors_of(const std::vector<RankLog>& logs) {
  std::map<std::string, std::pair<std::set<int>, int64_t>> hosts;
  for (const RankLog& log : logs) {
    auto& [cores, threads] = hosts[log.host];
    cores.insert(log.cores.begin(), log.cores.end());
    threads += log.threads;
  }
  Processors worst;
  for (const auto& [name, host] : hosts) {
    const Processors here{std::ssize(host.first), host.second};
    if (worst.threads == 0 || here.threads * worst.cores > worst.threads * here.cores) worst = here;
  }
  return worst;
}

}  // namespace tessera
