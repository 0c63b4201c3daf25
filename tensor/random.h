// Counter-based RNG: a random value is a pure function of (seed, name, step, global logical index).
//
// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) maps a 64-bit key (from seed
// and name, such as "blocks.0.mlp.up") and a 128-bit counter (step, index in the full tensor) to four 32-bit words. Any
// rank can therefore generate its shard under any partition.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>

namespace tessera {

class Philox {
 public:
  using Block = std::array<uint32_t, 4>;

  constexpr explicit Philox(uint64_t key) : key_(key) {}

  // Key of a named stream: FNV-1a over the name, mixed with the seed (SplitMix64's finalizer).
  static constexpr Philox named(uint64_t seed, std::string_view name) {
    uint64_t h = 0xcbf29ce484222325u;
    for (char c : name) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
    return Philox(mix(h ^ mix(seed + 0x9e3779b97f4a7c15u)));
  }

  // Ten rounds of two 32 x 32-bit multiplications.
  constexpr Block operator()(uint64_t index, uint64_t step = 0) const {
    uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32);
    uint32_t c2 = static_cast<uint32_t>(step), c3 = static_cast<uint32_t>(step >> 32);
    uint32_t k0 = static_cast<uint32_t>(key_), k1 = static_cast<uint32_t>(key_ >> 32);
    for (int round = 0; round < 10; ++round) {
      mix_round(c0, c1, c2, c3, k0, k1);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return {c0, c1, c2, c3};
  }

  // Four consecutive elements share a block. The word is selected by comparison, because a run-time index would move
  // the block to a GPU's local memory.
  constexpr uint32_t word(uint64_t i, uint64_t step = 0) const {
    const Block b = (*this)(i >> 2, step);
    const uint32_t low = i & 1 ? b[1] : b[0], high = i & 1 ? b[3] : b[2];
    return i & 2 ? high : low;
  }

  // Uniform in [0, 1), a multiple of 2^-24.
  constexpr float uniform(uint64_t i, uint64_t step = 0) const { return to_uniform(word(i, step)); }
  static constexpr float to_uniform(uint32_t w) { return static_cast<float>(w >> 8) * 0x1p-24f; }

  // uniform() of N elements from `first` on, for vectorized() (tensor/cpu/vectorize.h).
  template <int N>
  void uniforms(uint64_t first, uint64_t step, float* to) const {
    constexpr uint64_t kBlocks = N / 4 + 1;
    uint32_t w[4][kBlocks], k0 = static_cast<uint32_t>(key_), k1 = static_cast<uint32_t>(key_ >> 32);
    for (uint64_t b = 0; b < kBlocks; ++b) {
      w[0][b] = static_cast<uint32_t>((first >> 2) + b);
      w[1][b] = static_cast<uint32_t>(((first >> 2) + b) >> 32);
      w[2][b] = static_cast<uint32_t>(step);
      w[3][b] = static_cast<uint32_t>(step >> 32);
    }
    for (int round = 0; round < 10; ++round) {
      for (uint64_t b = 0; b < kBlocks; ++b) mix_round(w[0][b], w[1][b], w[2][b], w[3][b], k0, k1);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    for (uint64_t i = first & 3; i < (first & 3) + N; ++i) *to++ = to_uniform(w[i & 3][i >> 2]);
  }

  constexpr uint64_t bits(uint64_t index, uint64_t step = 0) const {
    const Block b = (*this)(index, step);
    return static_cast<uint64_t>(b[0]) << 32 | b[1];
  }

  // Uniform integer in [0, n): the high half of a 64 x 32-bit multiplication (bias below n / 2^64).
  constexpr uint64_t below(uint64_t n, uint64_t i, uint64_t step = 0) const {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(bits(i, step)) * n) >> 64);
  }

  // Standard normal (Box and Muller 1958), two elements per block, computed in double.
  double normal(uint64_t i, uint64_t step = 0) const {
    const Block b = (*this)(i >> 1, step);
    const double u = (static_cast<double>(static_cast<uint64_t>(b[0]) << 21 | b[1] >> 11) + 0.5) * 0x1p-53;
    const double angle =
        6.283185307179586 * (static_cast<double>(static_cast<uint64_t>(b[2]) << 21 | b[3] >> 11) * 0x1p-53);
    const double radius = std::sqrt(-2.0 * std::log(u));
    return radius * ((i & 1) != 0 ? std::sin(angle) : std::cos(angle));
  }

  constexpr uint64_t key() const { return key_; }

 private:
  static constexpr void mix_round(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t k0, uint32_t k1) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
  }
  static constexpr uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint64_t key_;
};

}  // namespace tessera
