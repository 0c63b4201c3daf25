// One rank's program in the tests of the MPI transport and of NCCL between processes: run under mpirun by mpi_test.sh
// and two_hosts_test.sh, with the name of a scenario. Prints one line per failed expectation and then exits with status
// 1.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "parallel/comm/mpi/world.h"
#include "tensor/cuda/gpus.h"
#include "tests/parallel/mpi/mpi_checks.h"

namespace tessera {
namespace {

using namespace test;

// Injected faults: no shared memory, or no threads.
std::atomic<bool> no_memory{false}, no_threads{false};

// Arenas that other ranks can map, that they cannot map, and that are mappable only on half of the ranks.
std::vector<ArenaPtr> arenas(const Communicator& world) {
  return {world.make_arena(), make_arena(), world.rank() % 2 == 0 ? world.make_arena() : make_arena()};
}

// Every operation with every algorithm.
void operations(Communicator& world) {
  for (const Algorithm algorithm : algorithms(true)) {
    world.set_algorithm(algorithm);
    check_operations(world, {1, 2, 17, 5003, 200'003},
                     {DType::float32, DType::bfloat16, DType::float64, DType::int32, DType::int64},
                     algorithm == Algorithm::direct ? arenas(world) : std::vector{make_arena()});
    expect(world.max(world.rank()) == world.size() - 1, "max");
    const ArenaPtr arena = make_arena();
    Tensor x = make_array(world.rank(), 5, DType::bfloat16, arena);
    world.all_reduce(x, Reduction::max);
    for (int64_t i = 0; i < 5; ++i) {
      double maximum = 0;
      for (int r = 0; r < world.size(); ++r) maximum = std::max(maximum, test::rank_input(r, i));
      expect(values(x)[static_cast<size_t>(i)] == maximum, "all_reduce of bfloat16, max");
    }
    world.barrier();
  }
}

// The bytes sent by all ranks together.
void bytes(Communicator& world) {
  const double n = world.size(), array = 5003 * 4;
  const std::map<Op, double> arrays = {{Op::all_reduce, 2 * (n - 1)}, {Op::reduce_scatter, n - 1},
                                       {Op::all_gather, n - 1},       {Op::broadcast, n - 1},
                                       {Op::reduce, n - 1},           {Op::scatter, (n - 1) / n}};
  for (const Algorithm algorithm : algorithms(true)) {
    world.set_algorithm(algorithm);
    const ArenaPtr arena = world.make_arena();
    const Tensor x = Tensor::zeros({5003}, DType::float32, arena);
    const Tensor part = Tensor::zeros({chunk_range(5003, world.size(), world.rank()).size()}, DType::float32, arena);
    world.reset_counts();
    world.all_reduce(x);
    if (algorithm != Algorithm::root) world.reduce_scatter(x, part);
    if (algorithm != Algorithm::root) world.all_gather(part, x);
    world.broadcast(x, 0);
    world.reduce(x, 0);
    const OpCounts counts = world.counts();
    world.set_algorithm(Algorithm::direct);
    for (const auto& [op, full] : arrays) {
      const OpCount& mine = counts[static_cast<size_t>(op)];
      const double sent = world.sum(static_cast<double>(mine.sent)), calls = world.sum(static_cast<double>(mine.calls));
      expect(calls == 0 || sent == full * array,
             "bytes of " + std::string(to_string(op)) + " by " + std::string(to_string(algorithm)));
    }
  }
}

// Bitwise identical to thread ranks.
void order(Communicator& world) {
  const int n = world.size();
  constexpr int64_t kSize = 100'003;
  for (const DType dtype : {DType::float32, DType::bfloat16})
    for (const Algorithm algorithm : test::kByMessages) {
      const std::vector<double> expected = sum_of_threads(n, algorithm, kSize, dtype);
      world.set_algorithm(algorithm);
      for (const ArenaPtr& arena : arenas(world)) {
        Tensor x = Tensor::empty({kSize}, dtype, arena);
        x.copy_from(for_order(world.rank(), n, kSize, dtype));
        world.all_reduce(x);
        expect(values(x) == expected, "the order of sums by " + std::string(to_string(algorithm)));
      }
    }
}

void messages(Communicator& world) { check_messages(world, 0, world.size() - 1, 30'000); }

void splits(Communicator& world) {
  const int n = world.size();
  const auto reversed = world.split(7, -world.rank(), "reversed");
  expect(reversed->rank() == n - 1 - world.rank() && reversed->world_rank(0) == n - 1,
         "the key turns the order around");
  const auto pairs = world.split(world.rank() / 2 - 5, 0, "pairs");
  expect(pairs->size() == std::min(2, n - world.rank() / 2 * 2), "the size of a pair");
  check_sums(*pairs, 1000, DType::float32, make_arena());
  const auto alone = reversed->split(world.rank(), 0, "alone");
  expect(alone->size() == 1 && alone->sum(3) == 3, "a group of one");
  std::vector<Work> pending;
  std::vector<Tensor> x;
  for (int i = 0; i < 20; ++i) {
    x.push_back(
        make_array(reversed->rank(), 30'000 + i, DType::float32, i % 3 == 0 ? make_arena() : world.make_arena()));
    pending.push_back((i % 2 == 0 ? *reversed : world).start_all_reduce(x.back()));
    if (i % 2 != 0) world.barrier();
  }
  for (Work& p : pending) p.wait();
  for (int i = 0; i < 20; i += 2)
    expect(values(x[static_cast<size_t>(i)]) == summed(n, 30'000 + i), "two groups in the background");
}

ArenaPtr make_gpu_arena(const Communicator& world) {
  if constexpr (kWithCuda) cuda::use_gpu(world.local_rank());
  return make_arena(Device::cuda);
}

// Ranks with one GPU each: every operation on GPU arrays, two concurrent groups, messages, and host arrays.
void on_gpus(Communicator& world) {
  const ArenaPtr gpu = make_gpu_arena(world);
  check_operations(world, {1, 2, 17, 5003},
                   {DType::float32, DType::bfloat16, DType::float64, DType::int32, DType::int64}, {gpu, make_arena()});
  const int n = world.size();
  const auto reversed = world.split(7, -world.rank(), "reversed");
  std::vector<Work> pending;
  std::vector<Tensor> x;
  for (int i = 0; i < 20; ++i) {
    x.push_back(make_array(world.rank(), 3000 + i, DType::float32, gpu));
    pending.push_back((i % 2 == 0 ? *reversed : world).start_all_reduce(x.back()));
    if (i % 3 == 0) check_sums(*reversed, 100, DType::float32, gpu);
    if (i % 5 == 0) world.barrier();
  }
  for (Work& p : pending) p.wait();
  for (int i = 0; i < 20; ++i)
    expect(values(x[static_cast<size_t>(i)]) == summed(n, 3000 + i), "two groups of GPUs in the background");
  const Tensor got = Tensor::zeros({500}, DType::bfloat16, gpu);
  if (world.rank() == 0) world.send(make_array(3, 500, DType::bfloat16, gpu), n - 1);
  if (world.rank() == n - 1) world.recv(got, 0);
  if (world.rank() == n - 1)
    expect(values(got) == values(make_array(3, 500, DType::bfloat16, gpu)), "a message from GPU to GPU");
}

// The faults: rank 1 is the culprit, and the others are in an all_reduce of 400 bytes.
void fault(Communicator& world, const std::string& what, const ArenaPtr& arena) {
  const auto zeros = [&](int64_t n) { return Tensor::zeros({n}, DType::float32, arena); };
  world.all_reduce(zeros(10));
  if (world.rank() == 1) {
    if (what == "throw") throw std::runtime_error("the cause");
    if (what == "kill") std::raise(SIGKILL);
    if (what == "stop") std::raise(SIGSTOP);
    if (what == "exit") _exit(0);
    if (what == "loop")
      for (;;) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (what == "mismatch") return world.broadcast(zeros(100), 0);
    if (what == "leave") return;
  }
  if (what == "kill-computing")
    for (int i = 0; i < 100; ++i) {
      if (world.rank() == 1) std::raise(SIGKILL);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  if (what == "stay")
    while (world.sum(std::filesystem::exists("/dev/shm/over") ? 1 : 0) == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
  if (what == "message" && world.rank() == 1) return world.send(zeros(7), 0);
  if (what == "message" && world.rank() == 0) world.recv(zeros(8), 1);
  world.all_reduce(zeros(100));
}

// Checks the number of hosts, as reported by MPI.
void hosts(Communicator& world, int expected) {
  int here = 0;
  MPI_Comm host = MPI_COMM_NULL;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  MPI_Comm_rank(host, &here);
  MPI_Comm_free(&host);
  expect(world.sum(here == 0 ? 1 : 0) == expected, std::to_string(expected) + " hosts");
}

int run_all(int on_hosts) {
  const MpiSession session;
  const LaunchOptions options{.backend = Backend::mpi, .timeout_s = 60};
  launch(options, [&](Communicator& world) { hosts(world, on_hosts); });
  for (const auto& part : {operations, bytes, order, messages, splits}) launch(options, part);
  return failures == 0 ? 0 : 1;
}

// Ranks of one host without shared memory: from the start, or after a first world with shared memory.
int run_by_messages(bool later) {
  const MpiSession session;
  const LaunchOptions options{.backend = Backend::mpi, .timeout_s = 60};
  no_memory = !later;
  launch(options, splits);
  no_memory = true;
  for (const auto& part : {bytes, messages, splits}) launch(options, part);
  return failures == 0 ? 0 : 1;
}

// According to `when`, rank 1 fails before the world exists or while the first or second world is created, or stops in
// MPI_Finalize at the end; the other ranks wait for it.
int run_lost(const std::string& when) {
  const MpiSession session(when == "end" ? 3 : 300);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const LaunchOptions options{.backend = Backend::mpi, .timeout_s = 2};
  if (when == "second") launch(options, messages);
  if (rank == 1 && when == "before") throw Error("the cause", Status::communication);
  no_threads = rank == 1 && (when == "first" || when == "second");
  launch(options, [](Communicator&) {});
  if (rank == 1 && when == "end") std::raise(SIGSTOP);
  return 0;
}

int run_on_gpus() {
  launch({.backend = Backend::nccl, .timeout_s = 60, .algorithm = Algorithm::native}, on_gpus);
  return failures == 0 ? 0 : 1;
}

int count_gpus() {
  int gpus = 0;
  if constexpr (kWithCuda && kWithNccl) gpus = cuda::gpu_count();
  std::printf("%d\n", gpus);
  return 0;
}

int run_fault(const std::string& scenario, const std::string& how) {
  const bool nccl = how == "nccl";
  const LaunchOptions options{
      .backend = nccl ? Backend::nccl : Backend::mpi,
      .timeout_s = scenario == "stay" ? 60.0 : 2.0,
      .algorithm = nccl ? Algorithm::native : value_named<Algorithm>(kAlgorithmNames, how).value()};
  launch(options, [&](Communicator& world) { fault(world, scenario, nccl ? make_gpu_arena(world) : make_arena()); });
  return 0;
}

template <class F>
F* original(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

}  // namespace
}  // namespace tessera

// These interpose the C library's functions.
extern "C" {
int memfd_create(const char* name, unsigned int flags) noexcept {
  if (!tessera::no_memory) return tessera::original<int(const char*, unsigned int)>("memfd_create")(name, flags);
  errno = ENOSYS;
  return -1;
}
int pthread_create(pthread_t* made, const pthread_attr_t* how, void* (*body)(void*), void* of) noexcept {
  if (tessera::no_threads) return EAGAIN;
  using Create = int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  return tessera::original<Create>("pthread_create")(made, how, body, of);
}
}

int main(int argc, char** argv) {
  try {
    const std::string scenario = argc > 1 ? argv[1] : "hosts", how = argc > 2 ? argv[2] : "";
    if (scenario == "hosts") return tessera::run_all(how.empty() ? 1 : std::stoi(how));
    if (scenario == "messages") return tessera::run_by_messages(how == "later");
    if (scenario == "lost") return tessera::run_lost(how);
    if (scenario == "gpus") return tessera::count_gpus();
    if (scenario == "nccl") return tessera::run_on_gpus();
    return tessera::run_fault(scenario, how.empty() ? "direct" : how);
  } catch (const tessera::Error& e) {
    std::fprintf(stderr, "tessera: %s\n", e.what());
    return static_cast<int>(e.status());
  }
}
