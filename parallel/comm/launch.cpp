// Thread launch, background worker, launcher detection.
#include "parallel/comm/launch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "parallel/comm/nccl/transport.h"
#include "parallel/comm/tcp/transport.h"
#include "parallel/comm/thread_transport.h"
#include "parallel/comm/trace.h"
#include "tensor/cpu/vectorize.h"

namespace tessera {

namespace {

// After a background failure the rank may have thrown only PeerFailed; `failure_state` then has the cause.
[[noreturn]] void rethrow(const std::exception_ptr& thrown, int rank, int ranks, const FailureState& failure_state) {
  const std::string prefix = "[rank " + std::to_string(rank) + "] ";
  if (!thrown) throw CommError(prefix + "returned while background communication was still running");
  try {
    std::rethrow_exception(thrown);
  } catch (const PeerFailed&) {
    throw CommError(prefix + failure_state.cause());
  } catch (const Error& e) {
    if (ranks == 1) throw;
    throw Error(prefix + e.what(), e.status());
  } catch (const std::exception& e) {
    throw CommError(prefix + failure_cause(e));
  }
}

// Wraps `transport` in NCCL, with the GPU of the local rank, and in `around`, as the options specify.
std::unique_ptr<Transport> wrap_transport(const LaunchOptions& o, std::unique_ptr<Transport> transport, int local_rank,
                                          int local_world_size) {
  if (o.backend == Backend::nccl) {
    if constexpr (kWithNccl)
      transport =
          std::make_unique<NcclTransport>(real_nccl(local_rank, local_world_size), std::move(transport), o.timeout_s);
    else
      throw Error("`backend` nccl: this build has no NCCL; reconfigure with CUDA and NCCL");
  }
  return o.around ? o.around(std::move(transport)) : std::move(transport);
}

std::shared_ptr<StallReporter> make_stall_reporter(const LaunchOptions& o) {
  return std::make_shared<StallReporter>(o.say ? o.say : [](const std::string& line) {
    std::fputs(("tessera: " + one_line(line) + "\n").c_str(), stderr);
  });
}

// Ignores errors so that they do not hide the failure.
void write_flight(const LaunchOptions& o, const Flight& flight, const std::string& cause) {
  const std::filesystem::path path = o.flight_file ? o.flight_file() : std::filesystem::path();
  if (path.empty()) return;
  const int file = open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  if (file < 0) return;
  const std::string line = flight.to_json(cause);  // one write, so that lines of several processes do not interleave
  const ssize_t written = write(file, line.data(), line.size());
  struct stat all {};
  if (written < std::ssize(line) && fstat(file, &all) == 0) {
    const off_t before = all.st_size - std::max<ssize_t>(0, written);
    if (before == 0 || ftruncate(file, before) != 0) unlink(path.c_str());
  }
  close(file);
}

// Threads cannot be killed: if a rank neither ends nor communicates, the process must exit.
void await_others(Flag& done, const LaunchOptions& o, int rank, const std::string& cause,
                  const std::function<void()>& before) {
  if (wait_for(done, static_cast<uint32_t>(o.ranks), {.timeout_s = o.timeout_s}) == WaitResult::arrived) return;
  before();
  const std::string line = "tessera: [rank " + std::to_string(rank) + "] " +
                           one_line(o.shown ? o.shown(cause) : cause) +
                           " (another rank does not stop; terminating the process)\n";
  std::fputs(line.c_str(), stderr);
  std::fflush(nullptr);
  std::_Exit(static_cast<int>(Status::communication));
}

}  // namespace

void check_threads(int64_t count) {
  std::atomic<bool> ended{false};
  std::vector<std::jthread> all;
  std::string cause;
  try {
    for (int64_t i = 0; i < count; ++i) all.emplace_back([&] { ended.wait(false); });
  } catch (const std::system_error& e) {
    cause = e.code().message();
  }
  const auto started = std::ssize(all);
  ended = true;
  ended.notify_all();
  all.clear();
  if (started < count)
    throw FieldError("ranks", fmt::format("cannot start {} threads: {} (started {}); reduce `ranks` or "
                                          "`threads_per_rank`, or raise the limit (ulimit -u, ulimit -v)",
                                          count, cause, started));
}

int threads_of_rank(int asked, int cores, int local_world_size) {
  if (asked > 0) return asked;
  return std::getenv("OMP_NUM_THREADS") ? cpu::threads() : std::max(1, cores / local_world_size);
}

void run_process(const LaunchOptions& o, std::unique_ptr<Transport> transport, int local_world_size,
                 const std::function<void(Communicator& world)>& body) {
  const auto flight = std::make_shared<Flight>(transport->rank(), transport->size(), make_stall_reporter(o));
  const int local_rank = transport->local_rank();
  try {
    Communicator all(wrap_transport(o, std::move(transport), local_rank, local_world_size), "world", o.algorithm);
    all.set_flight(flight);
    require_same(all, o.same);
    check_threads(cpu::threads());
    body(all);
    all.barrier();
  } catch (const Error& e) {
    write_flight(o, *flight, e.what());
    throw;
  } catch (const std::exception& e) {
    write_flight(o, *flight, failure_cause(e));
    throw CommError(failure_cause(e));
  }
}

std::string failure_cause(const std::exception& failure) {
  if (dynamic_cast<const std::bad_alloc*>(&failure)) {
    int64_t pages = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> pages >> resident;
    return OutOfMemory(fmt::format("an allocation outside tensors failed with {} bytes in use on the cpu",
                                   resident * sysconf(_SC_PAGESIZE)))
        .what();
  }
  if (const auto* file = dynamic_cast<const std::filesystem::filesystem_error*>(&failure))
    return fmt::format("{}: {}", file->path1().string(), file->code().message());
  if (const auto* system = dynamic_cast<const std::system_error*>(&failure))
    return fmt::format("system error: {}{}", system->code().message(),
                       system->code() == std::errc::resource_unavailable_try_again
                           ? "; if this is the thread limit, reduce `ranks` or raise the limit (ulimit -u, ulimit -v)"
                           : "");
  return failure.what();
}

std::string text_of_thrown(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& e) {
    return failure_cause(e);
  } catch (const std::string& text) {
    return text;
  } catch (const char* text) {
    if (text) return text;
  } catch (...) {
  }
  return "the thrown object is not a std::exception";
}

void launch(const LaunchOptions& o, const std::function<void(Communicator& world)>& user_body) {
  if (!user_body) throw FieldError("body", "expected a callable, got an empty std::function");
  if (!(o.timeout_s > 0))
    throw FieldError("timeout_s", fmt::format("expected more than 0 seconds, got {}", o.timeout_s));
  if (o.threads_per_rank < 0)
    throw FieldError("threads_per_rank", fmt::format("expected 0 or more, got {}", o.threads_per_rank));
  const auto body = [&](Communicator& world) {
    try {
      user_body(world);
    } catch (const std::exception&) {
      throw;
    } catch (...) {
      throw CommError(text_of_thrown(std::current_exception()));
    }
  };
  if constexpr (kWithNccl)
    if (o.backend == Backend::nccl) prepare_for_nccl();
  if (o.backend == Backend::mpi) {
    if constexpr (kWithMpi)
      return launch_under_mpi(o, body);
    else
      throw Error("`backend` mpi: this build has no MPI; install libopenmpi-dev and openmpi-bin and reconfigure");
  }
  if (o.backend == Backend::tcp || (o.backend == Backend::nccl && !o.rendezvous.empty()))
    return launch_over_tcp(o, body);
  if constexpr (kWithMpi)
    if (o.backend == Backend::nccl && mpi_surroundings()) return launch_under_mpi(o, body);
  expect_at_least(1, "ranks", o.ranks);
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const int threads_before = cpu::threads();
  const int team = o.threads_per_rank > 0 ? o.threads_per_rank
                   : o.ranks == 1         ? threads_before
                                          : std::max(1, threads_before / o.ranks);
  rlimit addresses{};
  if (getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY)
    mallopt(M_ARENA_MAX, 1);  // otherwise malloc reserves 64 MiB of the limited address space per thread
  check_threads(int64_t{o.ranks} * team - 1 + (o.ranks > 1 ? o.ranks : 0));  // one background thread per rank
  const auto failure_state = std::make_shared<FailureState>();
  const auto group = make_thread_group(o.ranks, o.timeout_s, o.ranks * team > cores, failure_state);
  std::vector<std::exception_ptr> thrown(static_cast<size_t>(o.ranks));
  std::vector<std::shared_ptr<Flight>> flights;
  for (const auto waits = make_stall_reporter(o); std::ssize(flights) < o.ranks;)
    flights.push_back(std::make_shared<Flight>(static_cast<int>(flights.size()), o.ranks, waits));
  const auto why = [&](size_t rank) -> std::string {
    try {
      if (thrown[rank]) std::rethrow_exception(thrown[rank]);
      return "";
    } catch (const std::exception& e) {
      return failure_cause(e);
    }
  };
  const auto write_flights = [&] {
    for (size_t r = 0; r < flights.size(); ++r) write_flight(o, *flights[r], why(r));
  };
  Flag done;  // counts finished ranks
  std::mutex counting;
  const auto count_done = [&] {
    const std::lock_guard lock(counting);
    raise(done, done.value.load() + 1);
  };
  const auto run = [&](int rank) {
    try {
      cpu::set_threads(team);
      Communicator world(wrap_transport(o, std::make_unique<ThreadTransport>(group, rank), rank, o.ranks), "world",
                         o.algorithm);
      world.set_flight(flights[static_cast<size_t>(rank)]);
      body(world);
      count_done();
    } catch (const std::exception& e) {
      thrown[static_cast<size_t>(rank)] = std::current_exception();
      failure_state->fail(rank, failure_cause(e));
      count_done();
      if (failure_state->failed_rank() == rank) await_others(done, o, rank, failure_cause(e), write_flights);
    }
  };
  {
    std::vector<std::jthread> threads;
    try {
      for (int r = 1; r < o.ranks; ++r) threads.emplace_back(run, r);
      run(0);
    } catch (const std::system_error& e) {
      thrown[0] = std::current_exception();
      failure_state->fail(0, failure_cause(e));
    }
  }
  cpu::set_threads(threads_before);
  const int failed = failure_state->failed_rank();
  if (failed >= 0) write_flights();
  if (failed >= 0) rethrow(thrown[static_cast<size_t>(failed)], failed, o.ranks, *failure_state);
}

CommWorker::CommWorker() : thread_([this] { loop(); }) {}

CommWorker::~CommWorker() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::future<void> CommWorker::push(std::function<void()> job) {
  Job queued{std::move(job), {}};
  std::future<void> done = queued.done.get_future();
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(queued));
  }
  changed_.notify_all();
  return done;
}

bool CommWorker::idle() {
  const std::lock_guard lock(mutex_);
  return jobs_.empty() && !busy_;
}

// The future becomes ready only after the job's tensors are released and the worker is idle (or has started the next
// job).
void CommWorker::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closing_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    busy_ = true;
    lock.unlock();
    std::exception_ptr thrown;
    try {
      job.run();
    } catch (...) {
      thrown = std::current_exception();
    }
    job.run = nullptr;
    lock.lock();
    busy_ = false;
    if (thrown)
      job.done.set_exception(thrown);
    else
      job.done.set_value();
  }
}

namespace {

int number(const char* text) {
  if (!text) return 0;
  const std::string_view view(text);
  int value = 0;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), value);
  return error == std::errc() && end == view.data() + view.size() && value > 0 ? value : 0;
}

}  // namespace

std::optional<MpiSurroundings> mpi_surroundings(const std::function<const char*(const char*)>& environment) {
  struct Known {
    const char *variable, *launcher;
  };
  constexpr std::array<Known, 3> launchers = {Known{"OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"},
                                              Known{"MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun"},
                                              Known{"PMI_SIZE", "a launcher with PMI"}};
  for (const Known& known : launchers)
    if (const int ranks = number(environment(known.variable)); ranks > 0) return MpiSurroundings{known.launcher, ranks};
  const int tasks = environment("SLURM_STEP_NUM_TASKS") ? number(environment("SLURM_STEP_NUM_TASKS"))
                                                        : number(environment("SLURM_NTASKS"));
  const bool joined = environment("PMI_RANK") || environment("PMIX_RANK") || environment("PMI_FD");
  if (tasks > 0 && joined) return MpiSurroundings{"SLURM's srun", tasks};
  return std::nullopt;
}

std::optional<MpiSurroundings> mpi_surroundings() {
  return mpi_surroundings([](const char* variable) { return std::getenv(variable); });
}

// Reads SLURM_STEP_NUM_TASKS, because an allocation sets SLURM_NTASKS even for programs not started by srun.
int unlinked_tasks(const std::function<const char*(const char*)>& environment) {
  const int tasks = number(environment("SLURM_STEP_NUM_TASKS"));
  return tasks > 1 && !mpi_surroundings(environment) ? tasks : 0;
}

int unlinked_tasks() {
  return unlinked_tasks([](const char* variable) { return std::getenv(variable); });
}

}  // namespace tessera
