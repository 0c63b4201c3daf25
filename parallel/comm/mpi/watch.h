// Who watches over the ranks of one host: what they tell each other through shared memory, and a thread of each that
// sees when another's process is gone.
//
// A rank that throws says so itself. One that is killed cannot: the others see its process end, and say it. The thread
// also speaks for a rank that computes, or is inside the MPI library, when another fails; and mpirun's SIGTERM, which
// follows a death within milliseconds, waits until what happened is known.
#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "parallel/comm/wait.h"

namespace tessera {

// The board of a host, in shared memory.
struct HostBoard {
  std::atomic<int> failed{-1};      // world rank; the first stands
  std::atomic<bool> silent{false};  // it cannot speak for itself
  std::atomic<bool> written{false};
  std::array<char, 400> cause{};
};

// One rank's line on it.
struct HostPlace {
  std::atomic<int> world_rank{-1};
  std::atomic<int64_t> process{0};
  std::atomic<bool> ended{false};  // in good order
};

class MpiWatch {
 public:
  struct Options {
    HostBoard* board = nullptr;
    std::vector<HostPlace*> places;  // places of this host's ranks
    int world_rank = 0;
    double timeout_s = 300;
    bool several_hosts = false;
    std::function<void()> listen;                        // to other hosts; called ten times a second
    std::function<void(const std::string& line)> abort;  // prints and ends the job
  };
  explicit MpiWatch(Options options);
  ~MpiWatch();  // stops watching
  MpiWatch(const MpiWatch&) = delete;
  MpiWatch& operator=(const MpiWatch&) = delete;

  static constexpr int kUnknown = std::numeric_limits<int>::max();  // the launcher ends the job; why is not known here

  // A rank that failed. `silent`: it cannot print its cause itself. False when another was first.
  bool fail(int world_rank, const std::string& cause, bool silent);
  int failed_rank() const { return options_.board->failed.load(std::memory_order_acquire); }
  bool culprit_is_silent() const { return options_.board->silent.load(std::memory_order_acquire); }
  const std::atomic<int>& flag() const { return options_.board->failed; }
  // "rank 1 has failed: its process 77 is gone"
  std::string failure() const;

  // While one lives, the calling thread is inside a call of MPI that cannot be interrupted.
  class Blocking {
   public:
    Blocking(MpiWatch& watch, std::string what);
    ~Blocking();
    Blocking(const Blocking&) = delete;
    Blocking& operator=(const Blocking&) = delete;

   private:
    MpiWatch& watch_;
    int64_t id_;
  };

 private:
  struct Entry {
    int64_t id;
    std::string what;
    std::chrono::steady_clock::time_point since;
  };
  void loop();
  void look_at_processes();
  void look_at_signal();
  void look_at_calls();
  void look_at_failure();

  Options options_;
  std::vector<int> descriptors_;  // descriptors of the others' processes, -1 where there is none
  std::atomic<bool> closing_{false};
  std::chrono::steady_clock::time_point failed_since_{}, signal_since_{};
  std::mutex mutex_;
  std::vector<Entry> entries_;
  int64_t next_id_ = 0;
  std::thread thread_;
};

}  // namespace tessera
