// Timing of collectives.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "bench/mpi/reference.h"
#include "bench/ranks.h"
#include "train/device.h"
#include "train/usage.h"

namespace tessera::bench {

int64_t sent_by(const Communicator& axis) {
  int64_t sent = 0;
  for (const OpCount& op : axis.counts()) sent += op.sent;
  return sent;
}

void Measured::add_sent(double counted, double closed_form) {
  add("sent", counted);
  add("sent_expected", closed_form);
  if (counted != closed_form && !std::isnan(counted))
    error = fmt::format("sent {} bytes per iteration; expected {} (closed form)", counted, closed_form);
}

double slowest_machine(Communicator& world) {
  world.barrier();
  return world.max(machine_seconds());
}

std::vector<int> Place::several(std::vector<int> default_value) const {
  if (!ranks.empty()) default_value.assign(ranks.begin(), ranks.end());
  if (processes()) default_value = {job->size()};
  std::erase(default_value, 1);
  return default_value;
}

Backend Place::backend() const {
  if (!processes()) return Backend::threads;
  return device == Device::cuda ? Backend::nccl : Backend::mpi;
}

namespace {

constexpr int kCallRounds = 9;

// The full array, this rank's chunk as a view of it, and a second array.
struct Arrays {
  Arrays(const ArenaPtr& arena, DType dtype, int64_t count, const Communicator& world)
      : full(Tensor::zeros({count}, dtype, arena)),
        chunk(full.narrow(0, count / world.size() * world.rank(), count / world.size())),
        other(Tensor::zeros({count}, dtype, arena)) {}
  Tensor full, chunk, other;
};

struct Collective {
  std::string_view name;
  Op op;
  bool native;           // available in MPI and NCCL
  double bus_numerator;  // busbw / algbw; if chunked, without the factor (n - 1) / n
  bool chunked;          // each rank reduces or holds one chunk of the array
  // Bytes sent by all ranks in units of S / n.
  int64_t (*volume)(int64_t n, bool through_root);
  void (*call)(Communicator& world, const Arrays& at);

  double bus_factor(double n) const { return bus_numerator * (chunked ? (n - 1) / n : 1); }
};

int64_t others(int64_t n, bool) { return (n - 1) * n; }
int64_t half(int64_t n, bool through_root) { return (n - 1) * (through_root ? n + 1 : n); }
int64_t shares(int64_t n, bool) { return n - 1; }

const Collective kCollectives[] = {
    {"all_reduce", Op::all_reduce, true, 2, true, [](int64_t n, bool) { return 2 * (n - 1) * n; },
     [](Communicator& w, const Arrays& at) { w.all_reduce(at.full); }},
    {"reduce_scatter", Op::reduce_scatter, true, 1, true, half,
     [](Communicator& w, const Arrays& at) { w.reduce_scatter(at.full, at.chunk); }},
    {"all_gather", Op::all_gather, true, 1, true, half,
     [](Communicator& w, const Arrays& at) { w.all_gather(at.chunk, at.full); }},
    {"broadcast", Op::broadcast, true, 1, false, others,
     [](Communicator& w, const Arrays& at) { w.broadcast(at.full, 0); }},
    {"reduce", Op::reduce, true, 1, false, others, [](Communicator& w, const Arrays& at) { w.reduce(at.full, 0); }},
    {"gather", Op::gather, false, 1, true, shares,
     [](Communicator& w, const Arrays& at) { w.gather(at.chunk, at.full, 0); }},
    {"scatter", Op::scatter, false, 1, true, shares,
     [](Communicator& w, const Arrays& at) { w.scatter(at.full, at.chunk, 0); }},
    {"all_to_all", Op::all_to_all, false, 1, true, others,
     [](Communicator& w, const Arrays& at) { w.all_to_all(at.full, at.other); }},
    {"send_recv", Op::send, false, 1, false, [](int64_t n, bool) { return n * n; },
     [](Communicator& w, const Arrays& at) {
       w.send(at.full, (w.rank() + 1) % w.size());
       w.recv(at.other, (w.rank() + w.size() - 1) % w.size());
     }},
};

struct Timed {
  double seconds = 0;  // per call, slowest rank
  double sent = 0;     // by this rank in all calls
};
template <class F>
Timed one_round(Communicator& world, Arena& arena, int64_t calls, const F& call) {
  world.barrier();
  const int64_t before = sent_by(world);
  const double took = measure_seconds([&] {
    for (int64_t i = 0; i < calls; ++i) call();
    if (arena.device() == Device::cuda) world.wait_for_gpu(arena, "a benchmark");
  });
  const auto sent = static_cast<double>(sent_by(world) - before);
  return {world.max(took) / static_cast<double>(calls), sent};
}

// Seconds per call in each round (slowest rank); bytes sent by all ranks per call.
template <class F>
std::pair<std::vector<double>, double> timed(Communicator& world, Arena& arena, int64_t calls, const F& call) {
  const int64_t rounds = std::min<int64_t>(kCallRounds, calls), repeats = std::max<int64_t>(1, calls / kCallRounds);
  std::vector<double> seconds;
  double sent = 0;
  for (int64_t round = -1; round < rounds; ++round) {
    const Timed found = one_round(world, arena, repeats, call);
    sent += found.sent;
    if (round >= 0) seconds.push_back(found.seconds);
  }
  return {seconds, world.sum(sent) / static_cast<double>((rounds + 1) * repeats)};
}

struct Case {
  const Collective* collective;
  Algorithm algorithm;
  bool reference = false;  // out-of-place MPI_Allreduce
  DType dtype = DType::float32;
  int64_t bytes = 0;
  Place place = {};
  size_t family = 0;
};

// S is `bytes` rounded down to a multiple of n.
Measured measure(const Case& c, Families& families, Communicator& world, int64_t calls) {
  const int64_t n = world.size(), count = c.bytes / element_size(c.dtype) / n * n;
  const ArenaPtr arena =
      c.place.device == Device::cuda ? rank_arena(Device::cuda, world.local_rank()) : world.make_arena();
  const Arrays arrays(arena, c.dtype, count, world);
  world.set_algorithm(c.algorithm);
  std::vector<double> machine;
  const auto check_machine = [&] {
    for (int i = 0; i < kChecks; ++i) machine.push_back(slowest_machine(world));
  };
  check_machine();
  const auto [rounds, sent] = timed(world, *arena, calls, [&] {
    if constexpr (kWithMpi)
      if (c.reference) return mpi_all_reduce_out_of_place(arrays.full.data<float>(), arrays.other.data<float>(), count);
    c.collective->call(world, arrays);
  });
  world.set_algorithm(Algorithm::direct);
  check_machine();
  const auto size = static_cast<double>(count * element_size(c.dtype));
  Measured m(rounds);
  m.machine = machine;
  m.add("bytes", size);
  m.add("algbw", size / m.seconds);
  m.add("busbw", c.collective->bus_factor(static_cast<double>(n)) * size / m.seconds);
  const auto volume = static_cast<double>(c.collective->volume(n, c.algorithm == Algorithm::root));
  c.reference ? m.add_sent(kNone, kNone)
              : m.add_sent(sent, size / static_cast<double>(n) * volume);  // not reported by MPI
  if (world.rank() > 0) return m;
  std::vector<Sample>& samples = families[c.family].samples;
  // Replaces samples from iteration-count estimates.
  std::erase_if(samples, [&](const Sample& s) { return s.bytes == size; });
  samples.push_back({size, m.seconds});
  return m;
}

// Algorithms over messages and native implementations; NCCL has only native ones.
std::vector<Case> implementations(const Collective& collective, Backend backend) {
  std::vector<Case> out;
  if (backend != Backend::nccl)
    for (size_t a = 0; a < kAlgorithms.size(); ++a)
      if (static_cast<Algorithm>(a) == Algorithm::direct || kAlgorithms[a].has(collective.op))
        out.push_back({&collective, static_cast<Algorithm>(a)});
  if (backend != Backend::threads && collective.native) out.push_back({&collective, Algorithm::native});
  if (backend == Backend::mpi && collective.name == "all_reduce") out.push_back({&collective, Algorithm::direct, true});
  return out;
}

// Calls per round, for rounds of similar duration.
int64_t default_calls(int64_t bytes) { return kCallRounds * std::clamp<int64_t>((32 << 20) / bytes, 1, 2000); }

void add_family(const Place& place, Backend backend, int ranks, Case c, Families& families,
                std::vector<RankRow>& rows) {
  if (c.reference && c.dtype != DType::float32) return;  // not an MPI datatype
  const std::string name = fmt::format("collective/{}/{}/{}/{}", c.collective->name,
                                       c.reference ? "mpi-out-of-place" : to_string(c.algorithm), value_name(backend),
                                       ranks),
                    end = c.dtype == DType::float32 ? "" : fmt::format("/{}", value_name(c.dtype));
  c.place = place;
  c.family = families.size();
  families.push_back({name + end, c.collective->bus_factor(ranks)});
  std::vector<int64_t> sizes = place.bytes;
  if (sizes.empty()) sizes = {1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20};
  if (place.bytes.empty() && c.dtype != DType::float32) sizes.pop_back();  // slow and not informative
  for (const int64_t bytes : sizes) {
    if (bytes < ranks * element_size(c.dtype)) continue;
    c.bytes = bytes;
    rows.push_back(
        {.name = fmt::format("{}/{}{}", name, bytes, end),
         .ranks = ranks,
         .measure = [c, &families](Communicator& world, int64_t calls) { return measure(c, families, world, calls); },
         .iterations = default_calls(bytes),
         .backend = backend,
         .unit = benchmark::kMicrosecond});
  }
}

}  // namespace

// Rounds iterate over all sizes, so a temporary slowdown affects all of them; the result is the median.
planner::LinkCost measure_exchange(planner::Exchange what, const Calibration& how, Communicator& world) {
  constexpr std::array<int64_t, 6> kBytes = {256, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20};
  const std::string_view name = planner::kExchangeNames[static_cast<size_t>(what)];
  const Collective& collective =
      *std::ranges::find_if(kCollectives, [&](const Collective& c) { return to_string(c.op) == name; });
  std::array<std::vector<double>, kBytes.size()> seconds;
  const ArenaPtr arena = world.make_arena();
  for (int round = -1; round < how.rounds; ++round)
    for (size_t i = 0; i < kBytes.size(); ++i) {
      const Arrays arrays(arena, DType::float32, kBytes[i] / 4, world);
      const int64_t calls = std::clamp<int64_t>((1 << 18) / kBytes[i], 1, 50);
      const Timed found = one_round(world, *arena, calls, [&] { collective.call(world, arrays); });
      if (round >= 0) seconds[i].push_back(found.seconds);
    }
  std::vector<planner::Timed> timed_sizes;
  for (size_t i = 0; i < kBytes.size(); ++i)
    timed_sizes.push_back({{1, static_cast<double>(kBytes[i])}, median(seconds[i])});
  const planner::Cost cost = planner::fit(timed_sizes);
  return {cost[0], cost[1]};
}

std::vector<RankRow> collective_rows(const Place& place, Families& families) {
  std::vector<int> thread_ranks{2};  // 4 and 8 are added if there are enough CPUs
  for (const int n : {4, 8})
    if (static_cast<unsigned>(n) <= std::thread::hardware_concurrency()) thread_ranks.push_back(n);
  std::vector<RankRow> rows;
  const auto add = [&](Backend backend, const std::vector<int>& ranks) {
    for (const int n : ranks)
      for (const Collective& collective : kCollectives)
        for (Case c : implementations(collective, backend))
          for (const DType dtype : {DType::float32, DType::bfloat16}) {
            c.dtype = dtype;
            add_family(place, backend, n, c, families, rows);
          }
  };
  add(place.backend(), place.several(thread_ranks));
  if (kWithNccl && !place.processes() && place.device == Device::cuda && gpu_count() > 1)
    add(Backend::nccl, {gpu_count()});
  return rows;
}

}  // namespace tessera::bench
