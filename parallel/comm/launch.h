// launch(): runs a function on every rank.
//
//   launch({.ranks = 4}, [](Communicator& world) { ... world.rank() ... });
//
// Backend::threads: ranks are threads of this process; rank 0 runs on the calling thread. If a rank throws, the others
// stop at their next communication, and launch() rethrows the exception, prefixed with the rank.
//
// Backend::mpi: this process is one rank of the job that mpirun or srun started. `ranks` must be 1 or the job's world
// size. If a rank throws, is killed or does not arrive, the job ends: see parallel/comm/mpi/world.h.
//
// Backend::tcp: this process is one rank of a rendezvous (parallel/comm/tcp/transport.h). Backend::nccl: ranks of any
// other backend with one GPU each.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "parallel/comm/communicator.h"

namespace tessera {

class StallReporter;

enum class Backend : uint8_t { threads, mpi, nccl, tcp };

struct LaunchOptions {
  Backend backend = Backend::threads;
  int ranks = 1;
  int threads_per_rank = 0;  // 0: cores / ranks, at least 1
  double timeout_s = 300;
  // Rendezvous "HOST:PORT" on rank 0's host, and this process's rank, for processes without a launcher; empty: none.
  std::string rendezvous = {};
  int rank = 0;
  Algorithm algorithm = Algorithm::direct;
  // Wraps each rank's transport, for observation or fault injection.
  std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)> around = {};
  // Formats the cause of a job's end, which is printed rather than thrown.
  std::function<std::string(const std::string& cause)> shown = {};
  // Facts that must be equal in every process.
  Facts same = {};
  // Receives a line about a long wait, from any rank's thread. Empty: standard error.
  std::function<void(const std::string& line)> say = {};
  // The file for the flight recorders of all ranks (parallel/comm/trace.h); called only after a failure. Empty function
  // or path: none.
  std::function<std::filesystem::path()> flight_file = {};
};

std::shared_ptr<StallReporter> make_stall_reporter(const LaunchOptions& options);
// Ignores errors so that they do not hide the failure.
void write_flight(const LaunchOptions& options, const Flight& flight, const std::string& cause);

// Wraps `transport` in NCCL, with the GPU of the local rank, and in `around`, as the options specify.
std::unique_ptr<Transport> wrap_transport(const LaunchOptions& options, std::unique_ptr<Transport> transport,
                                          int local_rank, int local_world_size);

// Starts and joins `count` threads, and throws FieldError if that fails (ulimit -u, or memory for their stacks),
// because OpenMP would abort the process.
void check_threads(int64_t count);
// Threads per rank: `asked`, else from the environment, else the cores divided by local_world_size.
int threads_of_rank(int asked, int cores, int local_world_size);
// Compares the facts, runs the body, and waits for all other ranks.
void run_rank(const LaunchOptions& options, std::unique_ptr<Transport> transport, const std::shared_ptr<Flight>& flight,
              const std::function<void(Communicator& world)>& body);
// run_rank() in a separate process. Before it rethrows a failure, it writes the flight recorder; a failure that is not
// an Error becomes one.
void run_process(const LaunchOptions& options, std::unique_ptr<Transport> transport, int local_world_size,
                 const std::function<void(Communicator& world)>& body);
// The cause of a failure; if memory or threads were exhausted, also what required them.
std::string failure_cause(const std::exception& failure);
std::string text_of_thrown(const std::exception_ptr& thrown);

void launch(const LaunchOptions& options, const std::function<void(Communicator& world)>& body);

// Defined if the build has MPI. If a rank throws, is killed or stopped, or does not arrive within the timeout, the
// cause is printed and the job ends with the error's status: this function never returns. Throws Error if the options
// do not match the job.
void launch_under_mpi(const LaunchOptions& options, const std::function<void(Communicator& world)>& body);

// Runs background communications in call order.

class CommWorker : NotCopied {
 public:
  CommWorker();
  ~CommWorker();

  std::future<void> push(std::function<void()> job);
  bool idle();

 private:
  struct Job {
    std::function<void()> run;
    std::promise<void> done;
  };
  void loop();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool busy_ = false, closing_ = false;
  std::thread thread_;
};

struct MpiSurroundings {
  std::string launcher;  // "Open MPI's mpirun"
  int ranks = 1;
};

// From the environment variables that launchers set; empty without a launcher. SLURM sets its variables for every job
// step, but the tasks are ranks only with a PMI, which the MPI library needs to connect them.
std::optional<MpiSurroundings> mpi_surroundings(const std::function<const char*(const char* variable)>& environment);
std::optional<MpiSurroundings> mpi_surroundings();  // of this process
// The number of tasks, if above 1, of a SLURM job step whose tasks cannot connect to each other; else 0.
int unlinked_tasks(const std::function<const char*(const char* variable)>& environment);
int unlinked_tasks();

// Guard code with `if constexpr (kWithMpi)`.

inline constexpr bool kWithMpi = TESSERA_WITH_MPI;
inline constexpr bool kWithNccl = TESSERA_WITH_NCCL;

}  // namespace tessera
