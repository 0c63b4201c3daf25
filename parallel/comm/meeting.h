// Barrier and in-place exchange of ranks with access to each other's memory (threads, or processes of one host).
//
//   post the call | raise own flag | wait for all other flags | compare the posts | ... | next barrier
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "parallel/comm/transport.h"

namespace tessera {

// In memory that all ranks of the group can access. Calls alternate between two entries: a rank overwrites an entry
// only after all ranks have arrived at the next call and so have read it.
struct RankState {
  Flag flag;
  std::array<Call, 2> posts;  // pointers are valid only for threads of one process
  CallLog log;                // for calls without a host barrier
};

class HostBarrier {
 public:
  // `leave` is called before anything is thrown, to notify all ranks that this one cannot continue. The transport must
  // outlive this object.
  HostBarrier(Transport& transport, int rank, std::vector<RankState*> places, WaitOptions wait_options,
              std::function<void()> leave)
      : transport_(transport),
        rank_(rank),
        places_(std::move(places)),
        wait_options_(std::move(wait_options)),
        leave_(std::move(leave)) {}

  void post(const Call& call) {
    rank_posts(rank_)[++calls_ % 2] = call;
    first_ = generation_ + 1;
  }
  // Throws PeerFailed if a rank has failed, and CommError if a rank times out or posted a different call.
  void wait();
  // Call after a barrier.
  const Call& current_post(int rank) const { return rank_posts(rank)[calls_ % 2]; }
  uint32_t calls() const { return calls_; }

 private:
  std::array<Call, 2>& rank_posts(int rank) const { return places_[static_cast<size_t>(rank)]->posts; }
  std::string last_operation(int rank) const;

  Transport& transport_;
  int rank_;
  std::vector<RankState*> places_;
  WaitOptions wait_options_;
  std::function<void()> leave_;
  uint32_t calls_ = 0, generation_ = 0;
  uint32_t first_ = 1;  // first barrier of this call
};

// In an all-reduce each rank adds its chunk of all arrays in rank order and writes the sum to all of them.

class InPlaceExchange {
 public:
  InPlaceExchange(int ranks, int rank);
  // Set before run(), with pointers that are valid in this process.
  Call& peer_call(int r) { return peer_calls_[static_cast<size_t>(r)]; }
  // For any operation except barrier, send and recv. Call between two barriers.
  void run(const Call& mine);

 private:
  void all_reduce(const Call& mine);
  void reduce(const Call& mine, Range range);

  int rank_;
  std::vector<Call> peer_calls_;
  std::vector<const std::byte*> in_;
  std::vector<std::byte*> out_;
};

}  // namespace tessera
