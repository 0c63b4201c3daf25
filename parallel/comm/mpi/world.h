// Ranks as MPI processes, on one host or several.
#pragma once
#include <mpi.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "parallel/comm/launch.h"
#include "parallel/comm/shared_exchange.h"

namespace tessera {

// Failure detection for the ranks of one host: shared memory, and a watcher thread per rank. A rank that throws reports
// its failure; if a rank is killed, the others detect the end of its process and report it. The watcher also reports
// failures while its rank computes or is inside the MPI library, and it delays mpirun's SIGTERM, which follows a death
// within milliseconds, until the cause is known.

struct HostPlace {
  std::atomic<int> world_rank{-1};
  std::atomic<int64_t> process{0};
  std::atomic<bool> ended{false};  // the rank ended normally
  FailureState failure_state;      // only that of the first rank of the host is used
};

class MpiWatch : NotCopied {
 public:
  struct Options {
    std::vector<HostPlace*> places;  // of the ranks of this host; the first has the failure state
    int world_rank = 0;
    double timeout_s = 300;
    bool several_hosts = false;
    std::function<void()> listen;
    std::function<void(const std::string& line)> abort;
  };
  explicit MpiWatch(Options options);
  ~MpiWatch();

  // Scope of an MPI call that cannot be interrupted.
  class Blocking : NotCopied {
   public:
    Blocking(MpiWatch& watch, std::string what);
    ~Blocking();

   private:
    MpiWatch& watch_;
    int64_t id_;
  };

 private:
  struct Entry {
    int64_t id;
    std::string what;
    double since;  // by timer_
  };
  void loop();
  void check_processes();
  void check_signal();
  void check_calls();
  void check_failure();

  Options options_;
  FailureState& failure_state_;
  std::vector<int> descriptors_;  // pidfds of the other ranks' processes; -1: none
  std::atomic<bool> closing_{false};
  std::chrono::steady_clock::time_point failed_since_{}, signal_since_{};
  std::mutex mutex_;
  AwakeTimer timer_;
  std::vector<Entry> entries_;
  int64_t next_id_ = 0;
  std::thread thread_;
};

class MessageDirectory;

// If MPI is not initialized, initializes and later finalizes it, except during stack unwinding, because MPI_Finalize
// waits for all ranks. Throws Error if the library does not support multiple threads, which background communication
// needs. Ends the process if the other ranks do not initialize or finalize within the timeout. A program that launches
// more than once under MPI must hold a session for its lifetime, because MPI cannot be initialized again.
class MpiSession : NotCopied {
 public:
  explicit MpiSession(double timeout_s = 300);
  ~MpiSession();

 private:
  double timeout_s_;
  bool owner_ = false;
  int exceptions_ = 0;  // uncaught exceptions at construction
  std::unique_ptr<MessageDirectory> messages_;
};

void mpi_check(int code, const char* call);

// Memory shared by the processes of one host, one segment per rank, reserved before use and not in /dev/shm.
class MpiWindow : NotCopied {
 public:
  // Collective: all ranks get the window or all get null; `why` is the reason on the ranks that know it.
  static std::unique_ptr<MpiWindow> make(MPI_Comm one_host, int64_t bytes_each, std::string& why);
  ~MpiWindow();
  std::byte* segment(int rank) const { return base_ + rank * each_; }  // page-aligned

 private:
  MpiWindow() = default;
  int map(int file, int rank);  // 0 or an errno

  int64_t each_ = 0;
  size_t bytes_ = 0;
  std::byte* base_ = nullptr;
};

struct MpiGroup {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0;
  std::vector<int> world_ranks;
  std::unique_ptr<MpiWindow> window;
  std::vector<SharedPlace*> places;
};

class MpiWorld : NotCopied {
 public:
  MpiWorld(double timeout_s, int threads_per_rank);

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_rank() const { return local_rank_; }
  int local_world_size() const { return local_world_size_; }
  int threads_per_rank() const { return threads_per_rank_; }
  const WaitOptions& wait_options() const { return wait_options_; }
  MpiWatch& watch() { return *watch_; }
  FailureState& failure_state() { return host_places_[0]->failure_state; }
  // Null if other ranks' memory on this host cannot be mapped or there are no other ranks.
  PeerMemory* peers() const { return peers_.get(); }
  // Takes ownership of `comm`. Collective.
  MpiGroup& add(MPI_Comm comm);
  MpiGroup& all() { return *groups_.front(); }

  // Keeps a message alive until MPI has sent it. Thread-safe.
  void retain(MPI_Request request, std::vector<std::byte> bytes);
  size_t reap();  // releases the sent messages and returns the number of pending ones

  // Call after all ranks have finished; frees everything in creation order, which is the same on all ranks.
  void end();
  [[noreturn]] void abort(const std::string& line, int status);
  // Waits for the failing rank to end the job; after a timeout this rank ends it.
  [[noreturn]] void wait_for_abort(const std::string& line);

 private:
  struct Sent {
    MPI_Request request;
    std::vector<std::byte> bytes;
  };
  void connect_host();
  void report_messages(const std::string& why);
  bool several_hosts() const { return std::ssize(host_places_) < size_; }
  void map_peers();
  void notify_other_hosts(int failed, const std::string& cause);
  void poll_other_hosts();

  int rank_ = 0, size_ = 1, local_rank_ = 0, local_world_size_ = 1;
  int threads_per_rank_ = 1;
  WaitOptions wait_options_;
  MPI_Comm alarm_ = MPI_COMM_NULL, host_ = MPI_COMM_NULL;
  std::unique_ptr<MpiWindow> host_window_;  // null if this host's ranks do not share memory
  HostPlace own_place_;                     // this rank's private entry in that case
  std::vector<HostPlace*> host_places_;
  std::unique_ptr<PeerMemory> peers_;
  std::vector<std::unique_ptr<MpiGroup>> groups_;
  std::unique_ptr<MpiWatch> watch_;
  std::mutex sending_;
  std::deque<Sent> sent_;
  std::atomic<bool> printed_{false};
};

// Messages use MPI; the direct exchange uses shared memory between ranks of one host (parallel/comm/shared_exchange.h)
// and messages between hosts. native() uses the library's summation order. Every wait polls failures and the clock; the
// watcher covers calls that cannot be interrupted. Arrays on GPUs are staged through host memory.

class MpiTransport final : public Transport {
 public:
  MpiTransport(std::shared_ptr<MpiWorld> world, MpiGroup& group);

  int rank() const override { return group_.rank; }
  int size() const override { return static_cast<int>(group_.world_ranks.size()); }
  int world_rank(int rank) const override { return group_.world_ranks[static_cast<size_t>(rank)]; }
  int local_rank() const override { return world_->local_rank(); }
  std::string_view kind() const override { return "MPI ranks"; }
  void send(int to, int tag, const std::byte* data, int64_t bytes) override;
  void recv(int from, int tag, std::byte* data, int64_t bytes) override;
  int64_t direct(const Call& call) override;
  int64_t native(const Call& call) override;
  std::unique_ptr<Transport> split(int color, int key) override;
  void fail(const std::string& cause) override { world_->failure_state().fail(world_->rank(), cause); }
  const FailureState* failure_state() const override { return &world_->failure_state(); }
  std::vector<CallLog*> logs() override;
  bool maps_peers() const override { return shared_ && world_->peers() != nullptr; }

 private:
  // Throws if a rank fails or the wait times out.
  template <class Done>
  void wait_until(int from, int64_t bytes, const Done& done);

  std::shared_ptr<MpiWorld> world_;
  MpiGroup& group_;
  std::optional<SharedExchange> shared_;
};

}  // namespace tessera
