// launch(): the same function on every rank.
//
//   launch({.ranks = 4}, [](Communicator& world) { ... world.rank() ... });
//
// Backend::threads: ranks are threads of this process; rank 0 runs on the calling thread. When a rank throws, the
// others stop at their next communication (or where they wait in one), and launch() throws what that rank threw, with
// its number in front.
//
// Backend::mpi: this process is one rank of the job that mpirun or srun started (MpiSurroundings below). The
// world has the job's ranks; `ranks` may be 1 or must say the same. When a rank throws, is killed or does not come, the
// job ends: see parallel/comm/mpi/world.h.
//
// Backend::tcp: this process is one rank of several that meet at an address (parallel/comm/tcp/transport.h).
//
// Backend::nccl: threads, processes under MPI, or processes that meet, with a GPU each; arrays on GPUs go over NCCL.
#pragma once
#include <condition_variable>
#include <deque>
#include <thread>

#include "parallel/comm/communicator.h"

namespace tessera {

class StallReporter;

enum class Backend : uint8_t { threads, mpi, nccl, tcp };

struct LaunchOptions {
  Backend backend = Backend::threads;
  int ranks = 1;
  int threads_per_rank = 0;  // 0: the cores, divided among the ranks, at least one
  double timeout_s = 300;    // the longest that a rank waits for another
  // Where processes meet that nobody has joined, "HOST:PORT" on the host of rank 0, and which rank this one is; empty:
  // they do not.
  std::string rendezvous = {};
  int rank = 0;
  Algorithm algorithm = Algorithm::direct;
  // Puts something around each rank's transport, to observe it or to inject faults. Empty: nothing.
  std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)> around = {};
  // A cause as it is printed where it cannot be thrown to the caller: of a job that is ended. Empty: as it is.
  std::function<std::string(const std::string& cause)> shown = {};
  // Facts that must be the same in every process, compared before the body runs.
  Facts same = {};
  // Takes a line about a rank that has waited long, from any rank's thread. Empty: it goes to standard error.
  std::function<void(const std::string& line)> say = {};
  // The file that gets the flights of all ranks when one of them has failed (parallel/comm/trace.h); asked for then.
  // Empty, or an empty path: none.
  std::function<std::filesystem::path()> flight_file = {};
};

// For a rank's flight: what the options say about long waits.
std::shared_ptr<StallReporter> long_waits(const LaunchOptions& options);
// Adds a rank's flight to the file, with why it has ended. Says nothing where it cannot: there is a failure to be told.
void write_flight(const LaunchOptions& options, const Flight& flight, const std::string& cause);

// A rank's transport with what the options put around it: NCCL on the GPU of its number on this host, and `around`.
std::unique_ptr<Transport> finished_transport(const LaunchOptions& options, std::unique_ptr<Transport> transport,
                                              int local_rank, int local_world_size);

// Throws FieldError where this process may not start so many threads more (ulimit -u, or memory for their stacks): it
// starts and ends them. A thread that OpenMP cannot start would end the process.
void check_threads(int64_t count);
// Threads of each of so many ranks of a host: as asked for, as the environment says, or the cores divided.
int threads_of_rank(int asked, int cores, int local_world_size);
// The part of a process that is one rank: compares what must be the same, runs the body, and waits for all others, who
// would miss it.
void run_rank(const LaunchOptions& options, std::unique_ptr<Transport> transport, const std::shared_ptr<Flight>& flight,
              const std::function<void(Communicator& world)>& body);
// Returns the text about a failure; where memory or threads were not to be had, it says what for.
std::string failure_cause(const std::exception& failure);
// The text of whatever was thrown: of an exception, or the text itself where a string was thrown.
std::string text_of_thrown(const std::exception_ptr& thrown);

void launch(const LaunchOptions& options, const std::function<void(Communicator& world)>& body);

// Runs the body in this process as one rank of an MPI job; defined where MPI is on. When a rank throws, the cause is
// printed and the job ends with the status of the error: this function then never returns. It is so too when a rank is
// killed, is stopped, or does not come within the timeout. Throws Error where the options do not fit the job.
void launch_under_mpi(const LaunchOptions& options, const std::function<void(Communicator& world)>& body);

// The thread of a communicator that runs what was started in the background, in the order in which it was started.

class CommWorker : NotCopied {
 public:
  CommWorker();
  ~CommWorker();  // runs what is still queued

  std::future<void> push(std::function<void()> job);
  bool idle();  // nothing queued and nothing running

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

// The launcher that started this process: none, or one of MPI's (mpirun, mpiexec, srun) that runs several of it.

struct MpiSurroundings {
  std::string launcher;  // "Open MPI's mpirun"
  int ranks = 1;
};

// Read from the environment variables that launchers set; nothing where there are none. SLURM sets its own for every
// job step: without a PMI, which the MPI library would join the others by, each task stands alone and is no rank.
std::optional<MpiSurroundings> mpi_surroundings(const std::function<const char*(const char* variable)>& environment);
std::optional<MpiSurroundings> mpi_surroundings();  // surroundings of this process
// The tasks of a job step of SLURM's that cannot join each other, where they are several; else 0.
int lone_tasks(const std::function<const char*(const char* variable)>& environment);
int lone_tasks();

// Which transports this build holds, decided when it was configured: `if constexpr (kWithMpi)` never names what is
// not there.

inline constexpr bool kWithMpi = TESSERA_WITH_MPI;
inline constexpr bool kWithNccl = TESSERA_WITH_NCCL;

}  // namespace tessera
