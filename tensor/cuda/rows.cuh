// Row-wise kernels, in vectors of 16 bytes.
//
// Thread t of a row's W threads accumulates vectors t, t + W, ... in order; sums are combined in pairs within each
// warp, then warp by warp. W depends only on the row's length and type, so a row is bitwise identical at any position,
// next to any rows, with vectorized or scalar loads.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "tensor/cuda/loops.cuh"
#include "tensor/cuda/mma.cuh"

namespace tessera::cuda {

inline constexpr int kRowThreads = 512;  // per row
inline constexpr int kRegs = 4;          // vectors in registers per thread

template <class T>
inline constexpr int kVecElems = static_cast<int>(16 / sizeof(T));

struct Rows {
  int64_t count = 0;
  int length = 0;  // elements
  int width = 32;  // threads per row: one warp, or a full block
  Grid grid() const {
    constexpr int kWarps = 8;
    return width == 32 ? Grid{.blocks = blocks_for(count, kWarps), .threads = 32 * kWarps}
                       : Grid{.blocks = count, .threads = width};
  }
};

// About `per_thread` vectors per thread, at least one warp and at most `max` threads.
template <class T>
Rows partition_rows(int64_t count, int64_t length, int per_thread = kRegs, int max = kRowThreads) {
  const int64_t threads = blocks_for(blocks_for(length, kVecElems<T>), per_thread);
  return {count, static_cast<int>(length), static_cast<int>(std::clamp<int64_t>((threads + 31) / 32 * 32, 32, max))};
}

// Whether rows of all operands (which may be null) consist of aligned vectors. Kernels are compiled for both cases
// (kVectorized).
template <class T, class... P>
bool is_vectorizable(int64_t length, const P*... operands) {
  return length % kVecElems<T> == 0 && ((reinterpret_cast<uintptr_t>(operands) % 16 == 0) && ...);
}

struct RowThread {
  int64_t row = 0;
  int thread = 0, width = 0;
  template <class T>
  __device__ int offset(int k) const {  // offset of the thread's k-th vector
    return (thread + k * width) * kVecElems<T>;
  }
};

// Warps without a row may return: rows wider than a warp have one block each.
__device__ inline RowThread row_thread(const Rows& rows) {
  const int t = static_cast<int>(threadIdx.x);
  if (rows.width != 32) return {blockIdx.x, t, rows.width};
  return {static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + t / 32, t % 32, 32};
}

// Zero beyond the row's end.
template <bool kVectorized, class T>
__device__ Packed<T, kVecElems<T>> load_vector(const T* row, int j, int length) {
  if constexpr (kVectorized) {
    return load<kVecElems<T>>(row + j);
  } else {
    Packed<T, kVecElems<T>> packed;
    for (int k = 0; k < kVecElems<T>; ++k) packed.v[k] = j + k < length ? row[j + k] : T(0);
    return packed;
  }
}
template <bool kVectorized, class T>
__device__ void store_vector(T* row, int j, int length, const Packed<T, kVecElems<T>>& packed) {
  if constexpr (kVectorized)
    store(row + j, packed);
  else
    for (int k = 0; k < kVecElems<T> && j + k < length; ++k) row[j + k] = packed.v[k];
}
template <bool kVectorized, class T, class F>
__device__ void each_in_vector(int j, int length, const F& f) {
#pragma unroll
  for (int k = 0; k < kVecElems<T>; ++k)
    if (kVectorized || j + k < length) f(k);
}

// A row that is read more than once: its first vectors stay in registers, further ones (in rows of more than
// kRowThreads * kRegs vectors) are reloaded. Stored as four words per vector, because narrow elements would
// occupy a register each.
template <class T, bool kVectorized>
struct RegisterRow {
  const T* row;
  uint4 vectors[kRegs] = {};

  __device__ RegisterRow(const T* from, const RowThread& at, int length) : row(from) {
#pragma unroll
    for (int k = 0; k < kRegs; ++k)
      if (const int j = at.offset<T>(k); j < length) set(k, load_vector<kVectorized>(row, j, length));
  }
  __device__ void set(int k, const Packed<T, kVecElems<T>>& packed) { vectors[k] = std::bit_cast<uint4>(packed); }
  __device__ Packed<T, kVecElems<T>> vector(int k) const { return std::bit_cast<Packed<T, kVecElems<T>>>(vectors[k]); }
};

template <class T>
__device__ void fetch_row(const T* row, const RowThread& at, int length) {
#pragma unroll
  for (int k = 0; k < kRegs; ++k)
    if (const int j = at.offset<T>(k); j < length) fetch(row + j);
}

// Calls f(k, j, packed...) for each of the thread's vectors; k is the register index, or kRegs.
template <class T, bool kVectorized, class F, class... More>
__device__ void each_numbered_vector(const RowThread& at, int length, const F& f,
                                     const RegisterRow<T, kVectorized>& first, const More&... more) {
#pragma unroll
  for (int k = 0; k < kRegs; ++k)
    if (const int j = at.offset<T>(k); j < length) f(k, j, first.vector(k), more.vector(k)...);
#pragma unroll 1
  for (int j = at.offset<T>(kRegs); j < length; j += at.width * kVecElems<T>)
    f(kRegs, j, load_vector<kVectorized>(first.row, j, length), load_vector<kVectorized>(more.row, j, length)...);
}
template <class T, bool kVectorized, class F, class... More>
__device__ void each_vector(const RowThread& at, int length, const F& f, const RegisterRow<T, kVectorized>& first,
                            const More&... more) {
  each_numbered_vector(
      at, length, [&](int, int j, const auto&... packed) { f(j, packed...); }, first, more...);
}

// Calls f(element...) with elements in the accumulation type.
template <class T, bool kVectorized, class F, class... More>
__device__ void each_element(const RowThread& at, int length, const F& f, const RegisterRow<T, kVectorized>& first,
                             const More&... more) {
  const auto element_values = [&](int j, const auto&... packed) {
#pragma unroll
    for (int k = 0; k < kVecElems<T>; ++k)
      if (kVectorized || j + k < length) f(static_cast<Accumulate<T>>(packed.v[k])...);
  };
  each_vector(at, length, element_values, first, more...);
}

// Replaces each vector v of `row` by f(j, v, vector of `other`). f must also store its result at `to`, from which
// vectors beyond the registers are reloaded.
template <class T, bool kVectorized, class F>
__device__ void change_vectors(const RowThread& at, int length, const F& f, RegisterRow<T, kVectorized>& row,
                               const RegisterRow<T, kVectorized>& other, const T* to) {
#pragma unroll
  for (int k = 0; k < kRegs; ++k)
    if (const int j = at.offset<T>(k); j < length) row.set(k, f(j, row.vector(k), other.vector(k)));
#pragma unroll 1
  for (int j = at.offset<T>(kRegs); j < length; j += at.width * kVecElems<T>)
    f(j, load_vector<kVectorized>(row.row, j, length), load_vector<kVectorized>(other.row, j, length));
  row.row = to;
}

// For a row that is read once; f may overwrite the vector.
template <bool kVectorized, class T, class F>
__device__ void stream_vectors(const RowThread& at, const T* row, int length, const F& f) {
  constexpr int kBatch = 4;  // loads in flight
  for (int first = 0; at.offset<T>(first) < length; first += kBatch) {
    uint4 batch[kBatch] = {};  // packed, because unpacking would wait for the load
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      if (const int j = at.offset<T>(first + k); j < length)
        batch[k] = std::bit_cast<uint4>(load_vector<kVectorized>(row, j, length));
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      if (const int j = at.offset<T>(first + k); j < length) f(j, std::bit_cast<Packed<T, kVecElems<T>>>(batch[k]));
  }
}

// `join` must be commutative; every thread of the row receives the result.
template <class A, class F>
__device__ A over_row(const RowThread& at, A value, const F& join) {
  for (int step = 16; step > 0; step /= 2) value = join(value, __shfl_xor_sync(~0u, value, step));
  if (at.width == 32) return value;
  __shared__ A of_warp[kRowThreads / 32];
  __syncthreads();  // previous values have been read
  if (at.thread % 32 == 0) of_warp[at.thread / 32] = value;
  __syncthreads();
  value = of_warp[0];
  for (int w = 1; w < at.width / 32; ++w) value = join(value, of_warp[w]);
  return value;
}

template <class A>
__device__ A row_sum(const RowThread& at, A value) {
  return over_row(at, value, [](A a, A b) { return a + b; });
}
template <class A>
__device__ A row_top(const RowThread& at, A value) {
  return over_row(at, value, [](A a, A b) { return a < b ? b : a; });
}

}  // namespace tessera::cuda
