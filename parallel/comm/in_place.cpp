// One rank's part of each collective.
#include "parallel/comm/in_place.h"

#include <span>

#include "parallel/comm/memory.h"

namespace tessera {

InPlaceExchange::InPlaceExchange(int ranks, int rank)
    : rank_(rank),
      seen_(static_cast<size_t>(ranks)),
      in_(static_cast<size_t>(ranks)),
      out_(static_cast<size_t>(ranks)) {}

void InPlaceExchange::all_reduce(const Call& mine) {
  for (size_t r = 0; r < seen_.size(); ++r) {
    in_[r] = seen_[r].in;
    out_[r] = seen_[r].out;
  }
  Memory(mine).reduce_ranks(in_, out_, piece(mine.count, static_cast<int>(seen_.size()), rank_));
}

// All ranks' elements of the range go to the beginning of this rank's out.
void InPlaceExchange::reduce(const Call& mine, Range range) {
  for (size_t r = 0; r < seen_.size(); ++r) in_[r] = seen_[r].in + range.begin * size_of(mine.dtype);
  std::byte* const out = mine.out;
  Memory(mine).reduce_ranks(in_, std::span(&out, 1), {0, range.size()});
}

void InPlaceExchange::run(const Call& mine) {
  const int n = static_cast<int>(seen_.size());
  const int64_t element = size_of(mine.dtype);
  const Memory memory(mine);
  const auto fetch = [&](std::byte* to, const std::byte* from, int64_t count) {
    memory.copy(to, from, count * element);
  };
  const Range own = piece(mine.count, n, rank_);
  switch (mine.op) {
    case Op::all_reduce:
      return all_reduce(mine);
    case Op::reduce_scatter:
      return reduce(mine, own);
    case Op::reduce:
      if (rank_ == mine.root) reduce(mine, {0, mine.count});
      return;
    case Op::all_gather:
    case Op::gather:
      for (int r = 0; r < n && (mine.op == Op::all_gather || rank_ == mine.root); ++r) {
        const Range theirs = piece(mine.count, n, r);
        fetch(mine.out + theirs.begin * element, seen(r).in, theirs.size());
      }
      return;
    case Op::broadcast:
      if (rank_ != mine.root) fetch(mine.out, seen(mine.root).in, mine.count);
      return;
    case Op::scatter:
      return fetch(mine.out, seen(mine.root).in + own.begin * element, own.size());
    case Op::all_to_all:
      for (int r = 0; r < n; ++r)
        fetch(mine.out + piece(mine.count, n, r).begin * element, seen(r).in + own.begin * element, own.size());
      return;
    default:
      return;
  }
}

}  // namespace tessera
