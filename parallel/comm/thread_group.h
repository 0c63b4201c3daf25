// What the threads of a group share: the places where they meet, and their mailboxes.
#pragma once
#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "parallel/comm/call_log.h"
#include "parallel/comm/cuda/streams.h"
#include "parallel/comm/transport.h"
#include "parallel/comm/wait.h"

namespace tessera {

inline constexpr int64_t kSmall = 2048;  // bytes that two ranks exchange with one meeting instead of two

struct Letter {
  int tag;
  std::vector<std::byte> bytes;  // from the host's memory,
  cuda::Parcel parcel;           // or from a GPU's
};

// What one rank has sent to another and that has not been fetched.
struct Mailbox {
  std::mutex mutex;
  std::deque<Letter> letters;
  Flag arrivals;  // counts letters
};

// A rank's place in the group. Calls alternate between two posts: a rank writes one again only after everybody has come
// to the call in between, and so has read it.
//
// Between arriving and departing a rank touches the memory of others, which must not go while it does. So it says that
// it works, and only works if no rank has failed by then; and a rank that gives up says so first, and goes only when
// nobody works any more. Of the two at least one sees what the other said.
//
// On GPUs the hosts meet as they do for arrays in their memory, and the streams after them: each rank marks its own
// when it comes, works behind everybody's mark, marks its stream again, and goes on behind everybody's second mark.
class ThreadGroup;
struct Place {
  Flag flag;
  std::atomic<bool> working{false};
  std::array<Call, 2> posts;
  CallLog log;                           // of calls in which the hosts do not meet
  cuda::Mark ready, done;                // of arrays on GPUs: they may be read and written; they no longer are
  std::shared_ptr<ThreadGroup> offered;  // by the first rank of a new group to the others of it, while they split
  alignas(128) std::array<std::array<std::byte, kSmall>, 2> small;
};

class ThreadGroup {
 public:
  ThreadGroup(std::vector<int> members, double timeout_s, bool crowded, std::shared_ptr<Board> failures)
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
  std::shared_ptr<Board> board;
  Patience patience;
  std::vector<Place> places;
  std::mutex mutex;
  std::map<std::pair<int, int>, std::unique_ptr<Mailbox>> mailboxes;
};

}  // namespace tessera
