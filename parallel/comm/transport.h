// Transport: carries bytes between the ranks of a group: threads of one process, processes under MPI, GPUs under NCCL.
//
// Who calls whom, from top to bottom; one arrow goes up again:
//
//   Communicator                  what users see: checks, counts and traces
//        |
//   run_collective()              chooses one of three ways (parallel/comm/algorithms.h)
//        |
//        +--> ring(), tree(), root()
//        |       |
//        |       +--> send(), recv()                  messages, of which all algorithms are made
//        |
//        +--> direct()            ranks that see each other's memory need no messages (threads; MPI on one host)
//        |       |
//        |       +--> direct_by_messages() --> send(), recv()         the default: back up into an algorithm
//        |
//        +--> native()            the collective of a library: MPI, NCCL
//
// direct(), native(), send() and recv() are functions of a Transport.
#pragma once
#include <memory>
#include <mutex>

#include "parallel/comm/call.h"
#include "parallel/comm/wait.h"

namespace tessera {

class CallLog;
class CommWorker;
class Flight;

// Where the first rank that fails says so, for all ranks and all groups of one launch.
class FailureState {
 public:
  // The first failure stands; a cause may be added to it later when it had none.
  void fail(int world_rank, const std::string& cause);
  int failed_rank() const { return failed_.load(std::memory_order_acquire); }  // negative: none
  std::string cause() const;
  const std::atomic<int>& flag() const { return failed_; }

 private:
  std::atomic<int> failed_{-1};
  mutable std::mutex mutex_;
  std::string cause_;
};

class Transport : NotCopied {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int world_rank(int rank) const = 0;  // world rank of a rank of this group, for messages to people
  // This rank's number among the ranks of the world on this machine; it chooses the GPU.
  virtual int local_rank() const { return world_rank(rank()); }
  virtual std::string_view kind() const = 0;  // "threads"
  // The name of the mesh axis, for what is said where no exception passes through the Communicator.
  virtual void set_axis(const std::string& axis) { axis_ = axis; }
  // Where this rank's waits are noted; null: nowhere.
  virtual void set_flight(std::shared_ptr<Flight> flight) { flight_ = std::move(flight); }

  // Messages between two ranks arrive in the order of sending, by tag. send() copies what it is given and never waits
  // for the receiver. recv() throws CommError when the message has another size, a rank fails or the time is over.
  virtual void send(int to, int tag, const std::byte* data, int64_t bytes) = 0;
  virtual void recv(int from, int tag, std::byte* data, int64_t bytes) = 0;

  // The same of bytes on a GPU, of whose arena they are a part; queued on its stream. The default takes them through
  // the host's memory.
  virtual void send_from_gpu(int to, int tag, const std::byte* data, int64_t bytes, Arena& gpu);
  virtual void recv_to_gpu(int from, int tag, std::byte* data, int64_t bytes, Arena& gpu);

  // Every rank sends its piece straight to where it belongs; sums are added in the order of ranks. Returns the bytes
  // that this rank sent. The default is made of messages.
  virtual int64_t direct(const Call& call);
  // True of arrays that only the library's collectives can reach, as in a GPU's memory.
  virtual bool only_native(const Call& /*call*/) const { return false; }
  // The library's own collective. Throws Error where there is none.
  virtual int64_t native(const Call& call);

  // Whether direct() takes calls that cut rows (Call::rows).
  virtual bool supports_row_slices() const { return false; }
  // Whether its ranks are processes that reach each other's arrays where these lie in shared_region()s.
  virtual bool maps_peers() const { return false; }
  // True of calls whose arrays lie on a GPU whose work is captured now: native() only queues those.
  virtual bool only_queues(const Call& /*call*/) const { return false; }
  // Starts native() for such a call, beside work that is queued on the rank's stream from now on. Work that is queued
  // there after the function that is returned was called comes after the collective.
  virtual std::function<void()> native_beside(const Call& call);
  // Where communications that are started run in the background; null: each communicator has a thread of its own.
  virtual std::shared_ptr<CommWorker> background() { return nullptr; }
  // For who waits for queued collectives, of any group of this rank, and has done so for `waited_s`. Throws CommError
  // when another rank or the library has failed, or the time is over, and ends what is under way.
  virtual void check_progress(double /*waited_s*/, const std::string& /*during*/) {}

  // Groups of the ranks that give the same color, ranked by key, then by rank here. Every rank calls it.
  virtual std::unique_ptr<Transport> split(int color, int key) = 0;

  // Ends waiting everywhere: this rank cannot go on. `cause` may be empty when it is not known yet.
  virtual void fail(const std::string& cause) = 0;
  // World rank of the rank that has failed; negative: none.
  virtual int failed_rank() const { return -1; }
  // Who that is, and why where it is known: "rank 1 has failed: its process 77 is gone".
  virtual std::string failure() const { return "rank " + std::to_string(failed_rank()) + " has failed"; }
  // Logs of each rank's calls, for calls in which they do not meet on the host. Empty where not all can see them.
  virtual std::vector<CallLog*> logs() { return {}; }

 protected:
  // For split(): the ranks that give this one's color, by key and then by rank. Every rank calls it.
  std::vector<int> group_members(int color, int key);
  // For recv(): asks until a message has come, which is told how long this rank has waited and may wait a moment
  // itself. Throws when a rank fails or the time is over.
  void await_message(int from, int64_t bytes, double timeout_s, const std::function<bool(double waited_s)>& has_come);
  // Throws CommError for a message of another size.
  void check_size(int from, int64_t bytes, int64_t sent) const;

  friend class PeerWait;
  std::string axis_ = "world";
  std::shared_ptr<Flight> flight_;
};

// A rank's wait for another rank of its group, reported to its flight recorder. `what` is called if a text is needed:
// it names the waiting operation and the other rank's last one.
class PeerWait final : public WaitObserver {
 public:
  using What = std::function<std::pair<std::string, std::string>()>;
  PeerWait(const Transport& transport, int rank, What what)
      : transport_(transport), rank_(rank), what_(std::move(what)) {}
  void overdue(double seconds, bool again) override;
  void waited(double seconds) override;

 private:
  const Transport& transport_;
  int rank_;
  What what_;
};

}  // namespace tessera
