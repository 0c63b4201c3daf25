// Transport: moves bytes between the ranks of a group: threads of one process, processes with MPI or TCP, GPUs with
// NCCL.
//
// Call graph:
//
//   Communicator                  the public interface: checks, counts and traces
//        |
//   run_collective()              selects one of three paths (parallel/comm/algorithms.h)
//        |
//        +--> ring(), tree(), root()
//        |       |
//        |       +--> send(), recv()                  messages, the basis of all algorithms
//        |
//        +--> direct()            ranks with access to each other's memory need no messages (threads; MPI on one host)
//        |       |
//        |       +--> direct_by_messages() --> send(), recv()         the default: an algorithm over messages
//        |
//        +--> native()            a library's collective: MPI, NCCL
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/comm/call.h"
#include "parallel/comm/failure.h"
#include "parallel/comm/wait.h"

namespace tessera {

class CallLog;
class CommWorker;
class Flight;

class Transport : NotCopied {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int world_rank(int rank) const = 0;
  // This rank's index among the world's ranks on its host; selects the GPU.
  virtual int local_rank() const { return world_rank(rank()); }
  virtual std::string_view kind() const = 0;  // "threads"
  // The mesh axis, for reports that do not pass through the Communicator.
  virtual void set_axis(const std::string& axis) { axis_ = axis; }
  // Records this rank's waits; null: off.
  virtual void set_flight(std::shared_ptr<Flight> flight) { flight_ = std::move(flight); }

  // Messages between two ranks arrive in sending order, by tag. send() copies its data and never waits for the
  // receiver. recv() throws CommError if the size differs, a rank fails, or the wait times out.
  virtual void send(int to, int tag, const std::byte* data, int64_t bytes) = 0;
  virtual void recv(int from, int tag, std::byte* data, int64_t bytes) = 0;

  // For data on a GPU, queued on the stream of its arena. The default stages the data in host memory.
  virtual void send_from_gpu(int to, int tag, const std::byte* data, int64_t bytes, Arena& gpu);
  virtual void recv_to_gpu(int from, int tag, std::byte* data, int64_t bytes, Arena& gpu);

  // Adds in rank order and returns the bytes that this rank sent. The default uses messages.
  virtual int64_t direct(const Call& call);
  // Whether only the library's collectives can access the arrays, e.g. in GPU memory.
  virtual bool only_native(const Call& /*call*/) const { return false; }
  // Throws Error if the library has no collective for the call.
  virtual int64_t native(const Call& call);

  // Whether direct() supports Call::rows.
  virtual bool supports_row_slices() const { return false; }
  // Whether ranks are processes that exchange arrays in shared_region()s in place.
  virtual bool maps_peers() const { return false; }
  // Whether the call's GPU stream is being captured, so native() only queues the call.
  virtual bool only_queues(const Call& /*call*/) const { return false; }
  // Starts native() for such a call, concurrently with later work on the rank's stream; the returned function makes
  // later work wait for the collective.
  virtual std::function<void()> start_native(const Call& call);
  // The thread for background communications; null: one per communicator.
  virtual std::shared_ptr<CommWorker> background() { return nullptr; }
  // Called during waits for queued collectives of any group of this rank. Aborts them and throws CommError if another
  // rank or the library has failed, or the wait times out.
  virtual void check_progress(double /*waited_s*/, const std::string& /*during*/) {}

  // The ranks with equal color, ordered by key, then by rank. Collective.
  virtual std::unique_ptr<Transport> split(int color, int key) = 0;

  // Ends all waits, because this rank cannot continue. `cause` may be empty if not yet known.
  virtual void fail(const std::string& cause) = 0;
  // Null: failures are not detected.
  virtual const FailureState* failure_state() const { return nullptr; }
  int failed_rank() const { return failure_state() ? failure_state()->failed_rank() : -1; }  // negative: none
  // The failure, as an error message names it.
  virtual std::string failure() const { return failure_state()->describe(); }
  // Call logs by rank, for calls without a host barrier; empty if some are not accessible.
  virtual std::vector<CallLog*> logs() { return {}; }

 protected:
  // Like split().
  std::vector<int> group_members(int color, int key);
  // Polls arrived(), which may block briefly. Throws if a rank fails or the wait times out.
  void await_message(int from, int64_t bytes, double timeout_s, const std::function<bool(double waited_s)>& arrived);
  void check_size(int from, int64_t bytes, int64_t sent) const;

  friend class PeerWait;
  std::string axis_ = "world";
  std::shared_ptr<Flight> flight_;
};

// Reports a rank's wait for another rank of its group. `what` returns the waiting operation and the awaited rank's last
// operation.
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
