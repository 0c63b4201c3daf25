// Ranks that see each other's memory, threads of one process or processes of one host: how they meet, and how they
// exchange arrays where these lie.
//
//   post the call | raise the own flag | wait for all other flags | compare the posts | ... | meet again
#pragma once

#include "parallel/comm/transport.h"

namespace tessera {

// A rank's place, in memory that all ranks of the group see. Calls alternate between two posts: a rank writes one again
// only after everybody has come to the call in between, and so has read it.
struct MeetingPlace {
  Flag flag;
  std::array<Call, 2> posts;  // the pointers in them mean something to threads of one process
  CallLog log;                // log of calls in which the hosts do not meet
};

// One rank's view of the places.
class HostMeeting {
 public:
  // `leave` is called before anything is thrown: it tells all ranks that this one cannot go on. The transport, whose
  // waits these are, must outlive the meeting.
  HostMeeting(Transport& transport, int rank, std::vector<MeetingPlace*> places, WaitOptions patience,
              std::function<void()> leave)
      : transport_(transport),
        rank_(rank),
        places_(std::move(places)),
        patience_(std::move(patience)),
        leave_(std::move(leave)) {}

  // The next call; meet() compares it with what the others ask for.
  void post(const Call& call) {
    rank_posts(rank_)[++calls_ % 2] = call;
    first_ = moment_ + 1;
  }
  // Returns when all ranks have come here. Throws PeerFailed when a rank has failed, and CommError for one that does
  // not come in time or asks for something else.
  void meet();
  // A rank's post of this call, after a meeting.
  const Call& current_post(int rank) const { return rank_posts(rank)[calls_ % 2]; }
  uint32_t calls() const { return calls_; }    // posted by this rank
  uint32_t moment() const { return moment_; }  // number of the last meeting

 private:
  std::array<Call, 2>& rank_posts(int rank) const { return places_[static_cast<size_t>(rank)]->posts; }
  std::string last_operation(int rank) const;

  Transport& transport_;
  int rank_;
  std::vector<MeetingPlace*> places_;
  WaitOptions patience_;
  std::function<void()> leave_;
  uint32_t calls_ = 0, moment_ = 0;
  uint32_t first_ = 1;  // first moment of this call
};

// The direct exchange of ranks that see each other's arrays: threads of one process, or processes that have mapped each
// other's memory. Each fetches what is meant for it from where it lies; of an all-reduce it adds its piece of all
// arrays and writes it to all of them. Sums are added in the order of ranks.

class InPlaceExchange {
 public:
  InPlaceExchange(int ranks, int rank);
  // The call that rank r asks for, with pointers that this rank can follow: to be filled in before run().
  Call& seen(int r) { return seen_[static_cast<size_t>(r)]; }
  // This rank's part of the collective, for any but barrier, send and recv: after everybody has come, and before
  // anybody goes.
  void run(const Call& mine);

 private:
  void all_reduce(const Call& mine);
  void reduce(const Call& mine, Range range);

  int rank_;
  std::vector<Call> seen_;
  std::vector<const std::byte*> in_;
  std::vector<std::byte*> out_;
};

}  // namespace tessera
