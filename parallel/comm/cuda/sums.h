// Sums over ranks on a GPU.
#pragma once
#include <span>

#include "parallel/comm/call.h"
#include "tensor/arena.h"

namespace tessera::cuda {

inline constexpr int kMostRanks = 64;  // as many as the parameters of a kernel have room for

// As tessera::reduce_ranks() with the call's dtype and reduction, in one kernel on the stream of the call's arena: the
// same order, the same bits. The pointers may be to memory of other ranks. Throws Error for more than kMostRanks.
void reduce_ranks(const Call& call, std::span<const std::byte* const> in, std::span<std::byte* const> out, Range range);

}  // namespace tessera::cuda
