// Ranks that are processes under MPI, on one host or several: who watches over them, what the transports of one process
// share, and the transport itself.
#pragma once
#include <mpi.h>

#include <limits>

#include "parallel/comm/launch.h"
#include "parallel/comm/shared_exchange.h"

namespace tessera {

// Who watches over the ranks of one host: what they tell each other through shared memory, and a thread of each that
// sees when another's process is gone.
//
// A rank that throws says so itself. One that is killed cannot: the others see its process end, and say it. The thread
// also speaks for a rank that computes, or is inside the MPI library, when another fails; and mpirun's SIGTERM, which
// follows a death within milliseconds, waits until what happened is known.

// The board of a host, in shared memory.
struct HostFailureState {
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

class MpiWatch : NotCopied {
 public:
  struct Options {
    HostFailureState* board = nullptr;
    std::vector<HostPlace*> places;  // places of this host's ranks
    int world_rank = 0;
    double timeout_s = 300;
    bool several_hosts = false;
    std::function<void()> listen;                        // to other hosts; called ten times a second
    std::function<void(const std::string& line)> abort;  // prints and ends the job
  };
  explicit MpiWatch(Options options);
  ~MpiWatch();  // stops watching

  static constexpr int kUnknown = std::numeric_limits<int>::max();  // the launcher ends the job; why is not known here

  // A rank that failed. `silent`: it cannot print its cause itself. False when another was first.
  bool fail(int world_rank, const std::string& cause, bool silent);
  int failed_rank() const { return options_.board->failed.load(std::memory_order_acquire); }
  bool culprit_is_silent() const { return options_.board->silent.load(std::memory_order_acquire); }
  const std::atomic<int>& flag() const { return options_.board->failed; }
  // "rank 1 has failed: its process 77 is gone"
  std::string failure() const;

  // While one lives, the calling thread is inside a call of MPI that cannot be interrupted.
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
  void look_at_processes();
  void look_at_signal();
  void look_at_calls();
  void look_at_failure();

  Options options_;
  std::vector<int> descriptors_;  // descriptors of the others' processes, -1 where there is none
  std::atomic<bool> closing_{false};
  std::chrono::steady_clock::time_point failed_since_{}, signal_since_{};
  std::mutex mutex_;
  AwakeTimer timer_;
  std::vector<Entry> entries_;
  int64_t next_id_ = 0;
  std::thread thread_;
};

// MPI itself: begun once in a process and ended once, and how it is recognised that a program was started under it.

// Ends the process in one line where what follows in its scope takes longer: calls of MPI that wait for all ranks have
// no clock of their own, and a rank that is stopped says nothing.
class MpiAlarm {
 public:
  MpiAlarm(double timeout_s, const char* what);

 private:
  std::jthread thread_;  // none where the system has no more
};

class MessageFolder;

// Begins MPI unless it runs already, and ends it in that case; not while an exception passes, since the end waits for
// all ranks, and the launcher ends them when this one has gone. Throws Error where the library cannot be used by
// several threads at a time, which communication in the background needs. Ends the process where the other ranks do not
// begin or end within the timeout. launch() makes its own; a program that
// launches more than once under MPI holds one from its start to its end, since MPI cannot be begun again.
class MpiSession : NotCopied {
 public:
  explicit MpiSession(double timeout_s = 300);
  ~MpiSession();

 private:
  double timeout_s_;
  bool owner_ = false;
  int exceptions_ = 0;  // under way when it was made
  std::unique_ptr<MessageFolder> messages_;
};

// Prints "tessera: [rank r] line", does what is given, and ends all ranks of the job with the status.
[[noreturn]] void end_mpi_job(
    const std::string& line, int status, const std::function<void()>& before_the_end = [] {});

// Throws CommError with MPI's own words for what went wrong in `call`.
void mpi_check(int code, const char* call);

// The state that the transports of one process share under MPI: the groups with their communicators and windows, the
// watch, and the way out.

// Memory that the processes of one host share, of which each has a segment. It takes nothing of /dev/shm, and its room
// is there before it is used.
class MpiWindow : NotCopied {
 public:
  // A collective call: all ranks get the window or none does, null; `why` says why not on the ranks that know.
  static std::unique_ptr<MpiWindow> make(MPI_Comm one_host, int64_t bytes_each, std::string& why);
  // Waits for nobody.
  ~MpiWindow();
  std::byte* segment(int rank) const { return base_ + rank * each_; }  // begins a page

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
  std::unique_ptr<MpiWindow> window;  // where all of them are on one host and share memory
  std::vector<SharedPlace*> places;
};

class MpiWorld : NotCopied {
 public:
  MpiWorld(double timeout_s, int threads_per_rank);

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_rank() const { return rank_here_; }
  int local_world_size() const { return ranks_here_; }  // on this host
  int threads_per_rank() const { return threads_per_rank_; }
  const WaitOptions& patience() const { return patience_; }
  MpiWatch& watch() { return *watch_; }
  // Other ranks' memory on this host; null where they cannot map it, or there are none.
  PeerMemory* peers() const { return peers_.get(); }
  // The group of a communicator, which it takes over. Every rank of it calls this.
  MpiGroup& add(MPI_Comm comm);
  MpiGroup& all() { return *groups_.front(); }

  // A message that MPI still reads from. Threads may send at the same time.
  void keep(MPI_Request request, std::vector<std::byte> bytes);
  size_t reap();  // forgets those that have left, and says how many have not

  // Every rank has come to its end: frees everything, in the order in which it was made on all ranks.
  void end();
  // Prints "tessera: [rank r] line" and ends the job.
  [[noreturn]] void abort(const std::string& line, int status);
  // Another rank says why it failed and ends the job; where that does not happen, this one does.
  [[noreturn]] void wait_for_the_end(const std::string& line);

 private:
  struct Sent {
    MPI_Request request;
    std::vector<std::byte> bytes;
  };
  void meet_host();
  void say_messages(const std::string& why);
  bool several_hosts() const { return std::ssize(host_places_) < size_; }  // or ranks that only messages reach
  void meet_peers();
  void tell_other_hosts(int failed, const std::string& cause);
  void listen_to_other_hosts();

  int rank_ = 0, size_ = 1, rank_here_ = 0, ranks_here_ = 1;
  int threads_per_rank_ = 1;
  WaitOptions patience_;
  MPI_Comm alarm_ = MPI_COMM_NULL, host_ = MPI_COMM_NULL;
  std::unique_ptr<MpiWindow> host_window_;  // null where this host's ranks share no memory
  HostPlace own_place_;                     // and the board, for this rank alone, where they do not
  HostFailureState own_board_;
  std::vector<HostPlace*> host_places_;
  HostFailureState* board_ = nullptr;
  std::unique_ptr<PeerMemory> peers_;
  std::vector<std::unique_ptr<MpiGroup>> groups_;
  std::unique_ptr<MpiWatch> watch_;
  std::mutex sending_;
  std::deque<Sent> sent_;
  std::atomic<bool> printed_{false};
};

// Ranks that are processes under MPI, on one host or several.
//
// Messages are MPI's. The direct exchange of ranks on one host goes through memory that they share
// (parallel/comm/shared_exchange.h); across hosts it is made of messages. native() is MPI's own collective, whose
// order of summation is the library's. Nothing waits without looking at failures and at the clock; what cannot be
// interrupted is under the eyes of the watch. Arrays on GPUs go through the host's memory, message by message.

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
  void fail(const std::string& cause) override;
  int failed_rank() const override { return world_->watch().failed_rank(); }
  std::string failure() const override { return world_->watch().failure(); }
  std::vector<CallLog*> logs() override;
  bool maps_peers() const override { return shared_ && world_->peers() != nullptr; }

 private:
  // Until done() is true; throws when a rank fails or the time is over.
  template <class Done>
  void patiently(int from, int64_t bytes, const Done& done);

  std::shared_ptr<MpiWorld> world_;
  MpiGroup& group_;
  std::optional<SharedExchange> shared_;
};

// MPI's collective for a call; blocks until it is done.
void mpi_collective(MPI_Comm comm, const Call& call);

}  // namespace tessera
