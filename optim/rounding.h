// Stochastic rounding to bfloat16 (Gupta et al. 2015, "Deep learning with limited numerical precision", section 3): up
// or down with probabilities that preserve the value in expectation. Updates below half a unit in the last place
// accumulate on average, so weights need no float32 master copy.
//
// The random bits are a function of the seed, the parameter's name, the step and the index in the full parameter, so a
// shard is rounded exactly like the same elements of the full parameter.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "nn/parameter.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/random.h"

namespace tessera {

// Uses the low sixteen bits of `random`. Non-finite values are rounded to nearest.
constexpr bfloat16 round_stochastically(float x, uint32_t random) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  bfloat16 up_or_down;
  up_or_down.bits = static_cast<uint16_t>((u + (random & 0xffffu)) >> 16);
  return (u & 0x7f800000u) == 0x7f800000u ? bfloat16(x) : up_or_down;
}

inline constexpr int64_t kRoundedAtOnce = 256;

// Random bits for three values per element: half a Philox block per element.
class RoundingBits {
 public:
  // For elements [full, full + count) of a parameter; count is at most kRoundedAtOnce.
  void sample(const Philox& random, uint64_t step, int64_t full, int64_t count) {
    skipped_ = full % 2;
    cpu::vectorized([first = words_[0], second = words_[1], random, step, pair = static_cast<uint64_t>(full) / 2,
                     pairs = (skipped_ + count + 1) / 2] {
      for (int64_t i = 0; i < pairs; ++i) {
        const Philox::Block b = random(pair + static_cast<uint64_t>(i), step);
        first[2 * i] = b[0];
        first[2 * i + 1] = b[2];
        second[2 * i] = b[1];
        second[2 * i + 1] = b[3];
      }
    });
  }
  // Rounds with separate bits for each `number` (0, 1, 2).
  template <class W>
  void round(bfloat16* to, const W* from, int64_t count, int number) const {
    const uint32_t* const words = words_[number / 2] + skipped_;
    const int shift = number % 2 * 16;
    for (int64_t i = 0; i < count; ++i) to[i] = round_stochastically(static_cast<float>(from[i]), words[i] >> shift);
  }

 private:
  alignas(64) uint32_t words_[2][kRoundedAtOnce + 2];
  int64_t skipped_ = 0;
};

// One stream per slot.
inline std::vector<Philox> rounding_streams(const FlatUnit& unit, uint64_t seed) {
  std::vector<Philox> out;
  for (const Slot& slot : unit.slots) out.push_back(Philox::named(seed, slot.parameter->source() + ".rounding"));
  return out;
}

// Calls f(begin, count, bits) for chunks of elements [begin, end) of a unit, all within the slot.
template <class F>
void for_each_rounded(const Slot& slot, const Philox& random, int64_t step, int64_t begin, int64_t end, const F& f) {
  RoundingBits bits;
  for_each_run(*slot.parameter, begin - slot.begin, end - slot.begin, [&](int64_t here, int64_t full, int64_t count) {
    for (int64_t done = 0; done < count; done += kRoundedAtOnce) {
      const int64_t now = std::min(kRoundedAtOnce, count - done);
      bits.sample(random, static_cast<uint64_t>(step), full + done, now);
      f(slot.begin + here + done, now, &bits);
    }
  });
}

}  // namespace tessera
