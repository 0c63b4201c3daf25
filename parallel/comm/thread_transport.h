// Ranks as threads of one process.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/comm/cuda/streams.h"
#include "parallel/comm/meeting.h"

namespace tessera {

inline constexpr int64_t kSmall = 2048;  // maximum bytes that two ranks exchange with one barrier

struct MailboxMessage {
  int tag;
  std::vector<std::byte> bytes;      // from host memory
  cuda::DeviceMessage device_bytes;  // from a GPU
};

struct Mailbox {
  std::mutex mutex;
  std::deque<MailboxMessage> messages;
  Flag arrivals;  // counts messages
};

// Between arrive and depart a rank accesses the memory of others, which must not be freed. So it sets `working` and
// proceeds only if no rank has failed; a failing rank first records its failure and leaves only when no rank is
// working. Sequential consistency guarantees that at least one of the two ranks observes the other's write.
//
// On GPUs the host barrier is followed by a barrier of the streams: each rank records an event when it arrives, works
// after all ranks' events, records a second event, and continues after all second events.
class ThreadGroup;
struct Place : RankState {
  std::atomic<bool> working{false};
  cuda::Mark ready, done;                // GPU arrays are accessible from `ready` until `done`
  std::shared_ptr<ThreadGroup> offered;  // new group, from its first rank to the others during split()
  alignas(128) std::array<std::array<std::byte, kSmall>, 2> small;
};

class ThreadGroup {
 public:
  ThreadGroup(std::vector<int> members, double timeout_s, bool oversubscribed, std::shared_ptr<FailureState> failures)
      : world_ranks(std::move(members)), failure_state(std::move(failures)), places(world_ranks.size()) {
    wait_options = {.timeout_s = timeout_s, .oversubscribed = oversubscribed, .failed_rank = &failure_state->flag()};
  }

  Mailbox& mailbox(int from, int to) {
    const std::lock_guard lock(mutex);
    std::unique_ptr<Mailbox>& box = mailboxes[{from, to}];
    if (!box) box = std::make_unique<Mailbox>();
    return *box;
  }

  std::vector<int> world_ranks;
  std::shared_ptr<FailureState> failure_state;
  WaitOptions wait_options;
  std::vector<Place> places;
  std::mutex mutex;
  std::map<std::pair<int, int>, std::unique_ptr<Mailbox>> mailboxes;
};

// Ranks are threads of one process and access each other's memory, so the direct exchange needs no copies. This
// transport has no dependencies and serves as the oracle for all other backends.

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<ThreadGroup> group, int rank);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(group_->world_ranks.size()); }
  int world_rank(int rank) const override { return group_->world_ranks[static_cast<size_t>(rank)]; }
  std::string_view kind() const override { return "threads"; }
  void send(int to, int tag, const std::byte* data, int64_t bytes) override;
  void recv(int from, int tag, std::byte* data, int64_t bytes) override;
  void send_from_gpu(int to, int tag, const std::byte* data, int64_t bytes, Arena& gpu) override;
  void recv_to_gpu(int from, int tag, std::byte* data, int64_t bytes, Arena& gpu) override;
  bool supports_row_slices() const override { return true; }
  int64_t direct(const Call& call) override;
  std::unique_ptr<Transport> split(int color, int key) override;
  void fail(const std::string& cause) override { group_->failure_state->fail(world_rank(rank_), cause); }
  const FailureState* failure_state() const override { return group_->failure_state.get(); }
  // Without the cause, which launch() reports.
  std::string failure() const override { return "rank " + std::to_string(failed_rank()) + " has failed"; }
  std::vector<CallLog*> logs() override;

 private:
  void arrive(const Call& call);
  void depart(const Call& call);
  void begin_work();
  void end_work() { place(rank_).working.store(false, std::memory_order_release); }
  // Called before an exception leaves the exchange: on return no rank accesses this rank's memory.
  void leave_barrier();
  [[noreturn]] void give_up(const Call& call);
  Place& place(int rank) const { return group_->places[static_cast<size_t>(rank)]; }
  void put(int to, MailboxMessage message);
  MailboxMessage take(int from, int tag, int64_t bytes);
  int64_t all_reduce_small(const Call& call);
  int64_t exchange(const Call& call);

  std::shared_ptr<ThreadGroup> group_;
  int rank_;
  HostBarrier barrier_;
  InPlaceExchange exchange_;
};

std::shared_ptr<ThreadGroup> make_thread_group(int ranks, double timeout_s, bool oversubscribed,
                                               std::shared_ptr<FailureState> failure_state);

}  // namespace tessera
