// Sends first, since none of them waits; then what the others sent.
#include "parallel/comm/uneven.h"

#include <numeric>
#include <span>

#include "parallel/comm/communicator.h"
#include "parallel/comm/memory.h"

namespace tessera {

namespace {

constexpr int kPieceTag = 7002;

Range part(const std::vector<int64_t>& sizes, int r) {
  const int64_t begin = std::accumulate(sizes.begin(), sizes.begin() + r, int64_t{0});
  return {begin, begin + sizes[static_cast<size_t>(r)]};
}

}  // namespace

Range piece_for(const Call& call, int ranks, int r) {
  return call.pieces ? part(call.pieces->sent, r) : piece(call.count, ranks, r);
}

Range piece_from(const Call& call, int ranks, int r) {
  return call.pieces ? part(call.pieces->received, r) : piece(call.count, ranks, r);
}

int64_t send_pieces(Transport& t, const Call& call) {
  const int own = t.rank(), ranks = t.size();
  const int64_t element = size_of(call.dtype);
  int64_t left = 0;
  for (int step = 1; step < ranks; ++step) {
    const int other = (own + step) % ranks;
    const Range there = piece_for(call, ranks, other);
    if (there.size() == 0) continue;
    Memory(call).send(t, other, kPieceTag, call.in + there.begin * element, there.size() * element);
    left += there.size() * element;
  }
  return left;
}

void receive_pieces(Transport& t, const Call& call) {
  const Memory memory(call);
  const int own = t.rank(), ranks = t.size();
  const int64_t element = size_of(call.dtype);
  const Range here = piece_for(call, ranks, own);
  memory.copy(call.out + piece_from(call, ranks, own).begin * element, call.in + here.begin * element,
              here.size() * element);
  for (int step = 1; step < ranks; ++step) {
    const int other = (own + ranks - step) % ranks;
    const Range back = piece_from(call, ranks, other);
    if (back.size() > 0) memory.recv(t, other, kPieceTag, call.out + back.begin * element, back.size() * element);
  }
}

int64_t exchange_uneven(Transport& t, const Call& call) {
  const int64_t left = send_pieces(t, call);
  receive_pieces(t, call);
  return left;
}

Call Communicator::uneven(const Tensor& in, const Tensor& out, const UnevenPieces& pieces) const {
  Call call = whole(Op::all_to_all, in);
  const auto fit = [&](const std::vector<int64_t>& sizes, const Tensor& array) {
    return std::ssize(sizes) == size() && std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == array.numel();
  };
  const auto own = static_cast<size_t>(rank());
  if (!fit(pieces.sent, in) || !fit(pieces.received, out) || pieces.sent[own] != pieces.received[own] ||
      out.dtype() != in.dtype() || !out.is_contiguous() ||
      (out.device() == Device::cuda ? out.arena().get() : nullptr) != call.gpu)
    complain(call, in.describe() + " and " + out.describe() + " are not the pieces of " + std::to_string(size()) +
                       " ranks, as many as their counts say");
  call.out = out.address();
  call.pieces = &pieces;
  return call;
}

void Communicator::all_to_all(const Tensor& in, const Tensor& out, std::span<const int64_t> sent,
                              std::span<const int64_t> received) {
  const UnevenPieces pieces{{sent.begin(), sent.end()}, {received.begin(), received.end()}};
  const Call call = uneven(in, out, pieces);
  if (!alone(call)) run(call, {in, out});
}

Pending Communicator::start_all_to_all(const Tensor& in, const Tensor& out, std::span<const int64_t> sent,
                                       std::span<const int64_t> received) {
  const auto pieces = std::make_shared<const UnevenPieces>(
      UnevenPieces{{sent.begin(), sent.end()}, {received.begin(), received.end()}});
  const Call call = uneven(in, out, *pieces);
  return alone(call) ? Pending() : start(call, {in, out}, algorithm_, pieces);
}

// One rank's part of each collective.

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
