// The state that the threads of a group share: the places where they meet, and their mailboxes.
#pragma once
#include <deque>

#include "parallel/comm/cuda/streams.h"
#include "parallel/comm/meeting.h"

namespace tessera {

inline constexpr int64_t kSmall = 2048;  // bytes that two ranks exchange with one meeting instead of two

struct Letter {
  int tag;
  std::vector<std::byte> bytes;  // from the host's memory,
  cuda::DeviceMessage parcel;    // or from a GPU's
};

// The messages that one rank has sent to another and that have not been fetched.
struct Mailbox {
  std::mutex mutex;
  std::deque<Letter> letters;
  Flag arrivals;  // counts letters
};

// A rank's place in the group.
//
// Between arriving and departing a rank touches the memory of others, which must not go while it does. So it says that
// it works, and only works if no rank has failed by then; and a rank that gives up says so first, and goes only when
// nobody works any more. Of the two at least one sees what the other said.
//
// On GPUs the hosts meet as they do for arrays in their memory, and the streams after them: each rank marks its own
// when it comes, works behind everybody's mark, marks its stream again, and goes on behind everybody's second mark.
class ThreadGroup;
struct Place : MeetingPlace {
  std::atomic<bool> working{false};
  cuda::Mark ready, done;                // marks of arrays on GPUs: may be read and written; no longer are
  std::shared_ptr<ThreadGroup> offered;  // new group that its first rank offers to its others, while they split
  alignas(128) std::array<std::array<std::byte, kSmall>, 2> small;
};

class ThreadGroup {
 public:
  ThreadGroup(std::vector<int> members, double timeout_s, bool crowded, std::shared_ptr<FailureState> failures)
      : world_ranks(std::move(members)), board(std::move(failures)), places(world_ranks.size()) {
    patience = {.timeout_s = timeout_s, .crowded = crowded, .poisoned = &board->flag()};
  }

  Mailbox& mailbox(int from, int to) {
    const std::lock_guard lock(mutex);
    std::unique_ptr<Mailbox>& box = mailboxes[{from, to}];
    if (!box) box = std::make_unique<Mailbox>();
    return *box;
  }

  std::vector<int> world_ranks;
  std::shared_ptr<FailureState> board;
  WaitOptions patience;
  std::vector<Place> places;
  std::mutex mutex;
  std::map<std::pair<int, int>, std::unique_ptr<Mailbox>> mailboxes;
};

// Ranks that are threads of one process. They see each other's memory, so the direct exchange needs no copies: each
// rank adds its piece of everybody's array and writes the sum to everybody. Nothing has to be installed; the oracle of
// all other backends.

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<ThreadGroup> group, int rank);
  ~ThreadTransport() override;

  int rank() const override { return rank_; }
  int size() const override;
  int world_rank(int rank) const override;
  std::string_view kind() const override { return "threads"; }
  void send(int to, int tag, const std::byte* data, int64_t bytes) override;
  void recv(int from, int tag, std::byte* data, int64_t bytes) override;
  void send_from_gpu(int to, int tag, const std::byte* data, int64_t bytes, Arena& gpu) override;
  void recv_to_gpu(int from, int tag, std::byte* data, int64_t bytes, Arena& gpu) override;
  bool supports_row_slices() const override { return true; }
  int64_t direct(const Call& call) override;
  std::unique_ptr<Transport> split(int color, int key) override;
  void fail(const std::string& cause) override;
  int failed_rank() const override;
  std::vector<CallLog*> logs() override;

 private:
  void arrive(const Call& call);
  void depart(const Call& call);
  void begin_work();
  void end_work();
  // Called before anything is thrown out of a meeting: when it returns, nobody reads or writes this rank's memory.
  void leave_meeting();
  [[noreturn]] void give_up(const Call& call);
  Place& place(int rank) const { return group_->places[static_cast<size_t>(rank)]; }
  void put(int to, Letter letter);
  Letter take(int from, int tag, int64_t bytes);
  int64_t all_reduce_small(const Call& call);
  int64_t exchange(const Call& call);

  std::shared_ptr<ThreadGroup> group_;
  int rank_;
  HostMeeting meeting_;
  InPlaceExchange exchange_;
};

// The group of all ranks of a launch, for each of its threads to take its transport from.
std::shared_ptr<ThreadGroup> make_thread_group(int ranks, double timeout_s, bool crowded,
                                               std::shared_ptr<FailureState> board);

}  // namespace tessera
