// Host barrier and in-place collectives.
#include "parallel/comm/meeting.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "parallel/comm/memory.h"

namespace tessera {

void HostBarrier::wait() {
  raise(places_[static_cast<size_t>(rank_)]->flag, ++generation_);
  const Call& mine = current_post(rank_);
  for (int r = 0; r < std::ssize(places_); ++r) {
    if (r == rank_) continue;
    // two captured words fit into std::function without allocation
    PeerWait observer(transport_, r, [this, r] { return std::pair(describe(current_post(rank_)), last_operation(r)); });
    const WaitResult waited = wait_for(places_[static_cast<size_t>(r)]->flag, generation_, wait_options_, &observer);
    if (waited == WaitResult::arrived) continue;
    leave_();
    if (waited == WaitResult::peer_failed) throw PeerFailed(describe(mine) + ": " + transport_.failure());
    throw CommError(describe(mine) + ": " +
                    did_not_arrive(transport_.world_rank(r), wait_options_.timeout_s, last_operation(r)));
  }
  for (int r = 0; generation_ == first_ && r < std::ssize(places_); ++r)
    if (!current_post(r).matches(mine)) {
      leave_();
      throw mismatch(mine, transport_.world_rank(r), current_post(r));
    }
}

// Reads the later of the missing rank's two posted calls; neither changes while the rank is missing.
std::string HostBarrier::last_operation(int rank) const {
  const uint32_t reached = places_[static_cast<size_t>(rank)]->flag.value.load(std::memory_order_acquire);
  if (static_cast<int32_t>(reached - first_) >= 0) return "it stopped during this operation";
  if (reached == 0) return "it has not communicated yet";
  return "its last operation was " + describe(rank_posts(rank)[(calls_ + 1) % 2]);
}

InPlaceExchange::InPlaceExchange(int ranks, int rank)
    : rank_(rank),
      peer_calls_(static_cast<size_t>(ranks)),
      in_(static_cast<size_t>(ranks)),
      out_(static_cast<size_t>(ranks)) {}

void InPlaceExchange::all_reduce(const Call& mine) {
  for (size_t r = 0; r < peer_calls_.size(); ++r) {
    in_[r] = peer_calls_[r].in;
    out_[r] = peer_calls_[r].out;
  }
  Memory(mine).reduce_ranks(in_, out_, chunk_range(mine.count, static_cast<int>(peer_calls_.size()), rank_));
}

// Writes the sum to the beginning of this rank's `out`.
void InPlaceExchange::reduce(const Call& mine, Range range) {
  for (size_t r = 0; r < peer_calls_.size(); ++r) in_[r] = peer_calls_[r].in + range.begin * element_size(mine.dtype);
  std::byte* const out = mine.out;
  Memory(mine).reduce_ranks(in_, std::span(&out, 1), {0, range.size()});
}

void InPlaceExchange::run(const Call& mine) {
  const int n = static_cast<int>(peer_calls_.size());
  const int64_t element = element_size(mine.dtype);
  const Memory memory(mine);
  const auto fetch = [&](std::byte* to, const std::byte* from, int64_t count) {
    memory.copy(to, from, count * element);
  };
  const Range own = chunk_range(mine.count, n, rank_);
  const int64_t width = own.size() / mine.rows, pitch = width * n;  // chunk width and row pitch
  switch (mine.op) {
    case Op::all_reduce:
      return all_reduce(mine);
    case Op::reduce_scatter:
      if (mine.rows == 1) return reduce(mine, own);
      for (size_t r = 0; r < peer_calls_.size(); ++r) in_[r] = peer_calls_[r].in + rank_ * width * element;
      return memory.reduce_rows(in_, mine.out, width, pitch);
    case Op::reduce:
      if (rank_ == mine.root) reduce(mine, {0, mine.count});
      return;
    case Op::all_gather:
    case Op::gather:
      for (int r = 0; r < n && (mine.op == Op::all_gather || rank_ == mine.root); ++r) {
        const Range theirs = chunk_range(mine.count, n, r);
        if (mine.rows == 1)
          fetch(mine.out + theirs.begin * element, peer_call(r).in, theirs.size());
        else
          memory.copy_rows(mine.out + r * width * element, pitch * element, peer_call(r).in, width * element,
                           width * element, mine.rows);
      }
      return;
    case Op::broadcast:
      if (rank_ != mine.root) fetch(mine.out, peer_call(mine.root).in, mine.count);
      return;
    case Op::scatter:
      return fetch(mine.out, peer_call(mine.root).in + own.begin * element, own.size());
    case Op::all_to_all:
      for (int r = 0; r < n; ++r)
        fetch(mine.out + chunk_range(mine.count, n, r).begin * element, peer_call(r).in + own.begin * element,
              own.size());
      return;
    default:
      return;
  }
}

}  // namespace tessera
