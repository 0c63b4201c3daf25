// A counted shuffle: where each of n things stands is a pure function of (key, round, place), so nothing is kept or
// carried, and any rank can ask for any place of any round.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "tensor/random.h"

namespace tessera {

// What stands at `place` of [0, count) in round `round`; in each round every number of [0, count) stands somewhere. A
// Feistel network over the next even power of two, walked until it comes back into range (Black and Rogaway 2002,
// "Ciphers with arbitrary finite domains"): about two walks. count is at most 2^62.
constexpr uint64_t permuted(const Philox& random, uint64_t round, uint64_t count, uint64_t place) {
  constexpr int kRounds = 8;
  const auto half = std::max<int64_t>((static_cast<int64_t>(std::bit_width(count - 1)) + 1) / 2, 1);
  const uint64_t mask = (uint64_t{1} << half) - 1;
  do {
    uint64_t left = place >> half, right = place & mask;
    for (uint64_t r = 0; r < kRounds; ++r) {
      const uint64_t next = left ^ (random(r << 32 | right, round)[0] & mask);
      left = right;
      right = next;
    }
    place = left << half | right;
  } while (place >= count);
  return place;
}

}  // namespace tessera
