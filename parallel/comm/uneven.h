// The all-to-all of pieces whose sizes differ, made of messages: for Communicator::all_to_all().
#pragma once
#include <cstddef>
#include <span>

#include "parallel/comm/transport.h"
#include "tensor/tensor.h"

namespace tessera {

// An array in pieces of so many elements, one for each rank, one after another.
struct UnevenPieces {
  const Tensor& array;
  std::span<const int64_t> counts;
  bool fit(int ranks) const;      // they are the whole of a contiguous array
  int64_t begin(int rank) const;  // bytes
  int64_t bytes(int rank) const { return counts[static_cast<size_t>(rank)] * size_of(array.dtype()); }
};

// Each rank sends piece r of `from` to rank r, the next rank's first; empty pieces are not sent. Returns the bytes that
// left this rank. Throws CommError where a message is not as long as its piece.
int64_t exchange_uneven(Transport& t, const Call& call, const UnevenPieces& from, const UnevenPieces& to);

}  // namespace tessera
