// Reduction over ranks on a GPU: each thread reads 16 bytes from every rank in order and writes the sum to every rank.
#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "parallel/comm/cuda/streams.h"
#include "parallel/comm/memory.h"
#include "tensor/cuda/loops.cuh"

namespace tessera::cuda {

namespace {

struct Pointers {
  const std::byte* in[kMaxRanks];
  std::byte* out[kMaxRanks];
  int ins, outs;
  int64_t width, pitch;  // of rows in `in`; width 0: one row
};

template <int N, class T, class Combine>
__device__ void reduce_at(const Pointers& p, int64_t i) {
  using W = Accumulate<T>;
  W total[N];
  const int64_t from = p.width == 0 ? i : i / p.width * p.pitch + i % p.width;
  const Packed<T, N> first = load<N>(reinterpret_cast<const T*>(p.in[0]) + from);
  for (int k = 0; k < N; ++k) total[k] = static_cast<W>(first.v[k]);
  for (int r = 1; r < p.ins; ++r) {
    const Packed<T, N> x = load<N>(reinterpret_cast<const T*>(p.in[r]) + from);
    for (int k = 0; k < N; ++k) total[k] = Combine{}(total[k], static_cast<W>(x.v[k]));
  }
  Packed<T, N> sum;
  for (int k = 0; k < N; ++k) sum.v[k] = static_cast<T>(total[k]);
  for (int r = 0; r < p.outs; ++r) store(reinterpret_cast<T*>(p.out[r]) + i, sum);
}

template <int N, class T, class Combine>
__global__ void reduce_kernel(Pointers p, Range range) {
  const int64_t first = range.begin + global_thread() * N;
  if (first + N <= range.end) return reduce_at<N, T, Combine>(p, first);
  for (int64_t i = first; i < range.end; ++i) reduce_at<1, T, Combine>(p, i);
}

// Whether N consecutive elements from `begin` on can be loaded as one vector from each pointer.
template <int N, class T>
bool in_vectors(const Pointers& p, int64_t begin) {
  const auto fits = [&](const std::byte* at) {
    return (reinterpret_cast<uintptr_t>(at) + static_cast<uintptr_t>(begin) * sizeof(T)) % (N * sizeof(T)) == 0;
  };
  for (int r = 0; r < p.ins; ++r)
    if (!fits(p.in[r])) return false;
  for (int r = 0; r < p.outs; ++r)
    if (!fits(p.out[r])) return false;
  return p.width % N == 0 && p.pitch % N == 0;
}

}  // namespace

void reduce_ranks(const Call& call, std::span<const std::byte* const> in, std::span<std::byte* const> out, Range range,
                  int64_t width, int64_t pitch) {
  if (in.size() > kMaxRanks || out.size() > kMaxRanks)
    throw Error("[comm] " + describe(call) + " of " + std::to_string(in.size()) +
                " thread ranks on GPUs; expected at most " + std::to_string(kMaxRanks));
  Pointers p{.in = {},
             .out = {},
             .ins = static_cast<int>(in.size()),
             .outs = static_cast<int>(out.size()),
             .width = width,
             .pitch = pitch};
  std::copy(in.begin(), in.end(), p.in);
  std::copy(out.begin(), out.end(), p.out);
  use_arena_gpu(*call.gpu);
  Context& c = call.gpu->local<Context>();
  with_dtype(call.dtype, [&](auto t) {
    with_reduction(call.reduction, [&](auto combine) {
      using T = decltype(t);
      using Combine = decltype(combine);
      constexpr int kN = kPerThread<T>;
      if (in_vectors<kN, T>(p, range.begin))
        launch(c, "sum over ranks", {.blocks = blocks_for(range.size(), int64_t{kThreads} * kN)},
               reduce_kernel<kN, T, Combine>, p, range);
      else
        launch(c, "sum over ranks", {.blocks = blocks_for(range.size(), kThreads)}, reduce_kernel<1, T, Combine>, p,
               range);
    });
  });
}

}  // namespace tessera::cuda
