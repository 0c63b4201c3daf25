// Replaces tensor/cuda/mma.cuh: the same functions, following the layouts of the PTX ISA.
//
// Asynchronous copies into shared memory complete only when they are waited for, so a kernel that reads too early sees
// the old contents.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tensor/dtype.h"
#include "tests/cuda_emulator/cuda_runtime.h"
#include "tests/cuda_emulator/emulator.h"

namespace tessera::cuda {

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const std::byte*>(p) - emulator::dynamic_shared());
}

struct EmulatedCopy {
  uint32_t to;
  const void* from;
  int group;
};
struct EmulatedCopies {
  std::vector<EmulatedCopy> waiting;
  int groups = 0;
};
inline EmulatedCopies& copies_of_thread() {
  static thread_local std::array<EmulatedCopies, 1024> all;
  return all[threadIdx.x];
}

inline void copy_async(uint32_t to, const void* from, bool valid) {
  EmulatedCopies& c = copies_of_thread();
  c.waiting.push_back({to, valid ? from : nullptr, c.groups});
}
inline void commit_copies() { ++copies_of_thread().groups; }
template <int kLeft>
void wait_for_copies() {
  EmulatedCopies& c = copies_of_thread();
  std::erase_if(c.waiting, [&](const EmulatedCopy& copy) {
    if (copy.group >= c.groups - kLeft) return false;
    std::byte* const to = emulator::dynamic_shared() + copy.to;
    if (copy.from)
      std::memcpy(to, copy.from, 16);
    else
      std::memset(to, 0, 16);
    return true;
  });
}

struct EmulatedLoad {
  uint32_t row;
  uint32_t* to;
};
inline void load_matrices_as(uint32_t (&to)[4], uint32_t row, bool transposed) {
  const EmulatedLoad mine{row, to};
  emulator::together(&mine, [transposed](const void* const* all) {
    const auto lane = [&](unsigned l) { return *static_cast<const EmulatedLoad*>(all[l]); };
    const auto element = [&](unsigned matrix, unsigned r, unsigned c) {
      uint16_t bits = 0;
      std::memcpy(&bits, emulator::dynamic_shared() + lane(8 * matrix + r).row + 2 * c, 2);
      return uint32_t{bits};
    };
    for (unsigned l = 0; l < 32; ++l)
      for (unsigned m = 0; m < 4; ++m) {
        const unsigned line = l / 4, first = 2 * (l % 4);
        lane(l).to[m] = transposed ? element(m, first, line) | element(m, first + 1, line) << 16
                                   : element(m, line, first) | element(m, line, first + 1) << 16;
      }
  });
}
inline void load_matrices(uint32_t (&to)[4], uint32_t row) { load_matrices_as(to, row, false); }
inline void load_transposed(uint32_t (&to)[4], uint32_t row) { load_matrices_as(to, row, true); }

struct EmulatedProduct {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};
inline float unpack_half(uint32_t pair, unsigned which) {
  bfloat16 x;
  x.bits = static_cast<uint16_t>(pair >> (16 * which));
  return x;
}
inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const EmulatedProduct mine{d, a, {b0, b1}};
  emulator::together(&mine, [](const void* const* all) {
    const auto lane = [&](unsigned l) -> const EmulatedProduct& {
      return *static_cast<const EmulatedProduct*>(all[l]);
    };
    float left[16][16], right[16][8];
    for (unsigned l = 0; l < 32; ++l)
      for (unsigned half = 0; half < 2; ++half) {
        const unsigned at = 2 * (l % 4) + half;
        for (unsigned part = 0; part < 4; ++part)
          left[l / 4 + part % 2 * 8][at + part / 2 * 8] = unpack_half(lane(l).a[part], half);
        for (unsigned part = 0; part < 2; ++part) right[at + part * 8][l / 4] = unpack_half(lane(l).b[part], half);
      }
    for (unsigned l = 0; l < 32; ++l)
      for (unsigned part = 0; part < 4; ++part) {
        const unsigned row = l / 4 + part / 2 * 8, column = 2 * (l % 4) + part % 2;
        float sum = lane(l).d[part];
        for (unsigned k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
        lane(l).d[part] = sum;
      }
  });
}

inline uint32_t pack_pair(float first, float second) {
  return bfloat16(first).bits | static_cast<uint32_t>(bfloat16(second).bits) << 16;
}

inline float fast_exp2(float x) { return std::exp2(x); }

// Memory of the running block.
template <class T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(emulator::dynamic_shared());
}

inline void fetch(const void*) {}

}  // namespace tessera::cuda
