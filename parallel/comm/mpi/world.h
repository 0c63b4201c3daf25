// MPI itself: begun once in a process and ended once, and how it is recognised that a program was started under it.
#pragma once
#include <mpi.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "parallel/comm/launch.h"
#include "parallel/comm/mpi/watch.h"
#include "parallel/comm/shared_exchange.h"

namespace tessera {

// Begins MPI unless it runs already, and ends it in that case; not while an exception passes, since the end waits for
// all ranks, and the launcher ends them when this one has gone. Throws Error where the library cannot be used by
// several threads at a time, which communication in the background needs. launch() makes its own; a program that
// launches more than once under MPI holds one from its start to its end, since MPI cannot be begun again.
class MpiSession {
 public:
  MpiSession();
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

 private:
  bool owner_ = false;
  int exceptions_ = 0;  // under way when it was made
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
class MpiWindow {
 public:
  // A collective call: all ranks get the window or none does, null; `why` says why not on the ranks that know.
  static std::unique_ptr<MpiWindow> make(MPI_Comm one_host, int64_t bytes_each, std::string& why);
  ~MpiWindow();  // waits for nobody
  MpiWindow(const MpiWindow&) = delete;
  MpiWindow& operator=(const MpiWindow&) = delete;
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

class MpiWorld {
 public:
  MpiWorld(double timeout_s, int threads_per_rank);
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int rank_here() const { return rank_here_; }
  int ranks_here() const { return ranks_here_; }  // on this host
  int threads_per_rank() const { return threads_per_rank_; }
  const Patience& patience() const { return patience_; }
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
  Patience patience_;
  MPI_Comm alarm_ = MPI_COMM_NULL, host_ = MPI_COMM_NULL;
  std::unique_ptr<MpiWindow> host_window_;  // null where this host's ranks share no memory
  HostPlace own_place_;                     // and the board, for this rank alone, where they do not
  HostBoard own_board_;
  std::vector<HostPlace*> host_places_;
  HostBoard* board_ = nullptr;
  std::unique_ptr<PeerMemory> peers_;
  std::vector<std::unique_ptr<MpiGroup>> groups_;
  std::unique_ptr<MpiWatch> watch_;
  std::mutex sending_;
  std::deque<Sent> sent_;
  std::atomic<bool> printed_{false};
};

}  // namespace tessera
