// launch(): the same function on every rank.
//
//   launch({.ranks = 4}, [](Communicator& world) { ... world.rank() ... });
//
// Backend::threads: ranks are threads of this process; rank 0 runs on the calling thread. When a rank throws, the
// others stop at their next communication (or where they wait in one), and launch() throws what that rank threw, with
// its number in front.
//
// Backend::mpi: this process is one rank of the job that mpirun or srun started (parallel/comm/surroundings.h). The
// world has the job's ranks; `ranks` may be 1 or must say the same. When a rank throws, is killed or does not come, the
// job ends: see parallel/comm/mpi/world.h.
//
// Backend::tcp: this process is one rank of several that meet at an address (parallel/comm/tcp/rendezvous.h).
//
// Backend::nccl: threads, processes under MPI, or processes that meet, with a GPU each; arrays on GPUs go over NCCL.
#pragma once
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "parallel/comm/communicator.h"

namespace tessera {

class LongWaits;

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
  // Puts something around each rank's transport, to watch it or to spoil what it does. Empty: nothing.
  std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)> around = {};
  // A cause as it is printed where it cannot be thrown to the caller: of a job that is ended. Empty: as it is.
  std::function<std::string(const std::string& cause)> shown = {};
  // Facts that must be the same in every process, compared before the body runs.
  Facts same = {};
  // Takes a line about a rank that has waited long, from any rank's thread. Empty: it goes to standard error.
  std::function<void(const std::string& line)> say = {};
  // Where the flights of all ranks are written when one of them has failed (parallel/comm/flight.h); asked for then.
  // Empty, or an empty path: nowhere.
  std::function<std::filesystem::path()> flight_file = {};
};

// For a rank's flight: what the options say about long waits.
std::shared_ptr<LongWaits> long_waits(const LaunchOptions& options);
// Adds a rank's flight to the file, with why it has ended. Says nothing where it cannot: there is a failure to be told.
void write_flight(const LaunchOptions& options, const Flight& flight, const std::string& cause);

// A rank's transport with what the options put around it: NCCL on the GPU of its number on this host, and `around`.
std::unique_ptr<Transport> finished_transport(const LaunchOptions& options, std::unique_ptr<Transport> transport,
                                              int rank_here, int ranks_here);

// Throws FieldError where this process may not start so many threads more (ulimit -u, or memory for their stacks): it
// starts and ends them. A thread that OpenMP cannot start would end the process.
void check_threads(int64_t count);
// Returns the text about a failure; where memory or threads were not to be had, it says what for.
std::string cause_of(const std::exception& failure);

void launch(const LaunchOptions& options, const std::function<void(Communicator& world)>& body);

// The thread of a communicator that runs what was started in the background, in the order in which it was started.

class CommWorker {
 public:
  CommWorker();
  ~CommWorker();  // runs what is still queued
  CommWorker(const CommWorker&) = delete;
  CommWorker& operator=(const CommWorker&) = delete;

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

}  // namespace tessera
