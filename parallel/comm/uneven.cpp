// Sends first, since none of them waits; then what the others sent.
#include "parallel/comm/uneven.h"

#include <numeric>

#include "parallel/comm/communicator.h"
#include "parallel/comm/memory.h"

namespace tessera {
namespace {

constexpr int kTag = 7002;

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
    Memory(call).send(t, other, kTag, call.in + there.begin * element, there.size() * element);
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
    if (back.size() > 0) memory.recv(t, other, kTag, call.out + back.begin * element, back.size() * element);
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

}  // namespace tessera
