// Column-wise kernels for a matrix (n, c): a thread processes 16 bytes of adjacent columns in some rows. Sums over rows
// take two passes, both in order: over runs of rows, whose length depends only on n, then over the runs' sums.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <span>

#include "tensor/cuda/rows.cuh"

namespace tessera::cuda {

// Rows per run: 32, or fewer to obtain 1,024 runs, which fill a GPU; below 4 rows the partial sums would be as large as
// the input.
inline int64_t rows_per_run(int64_t rows) {
  return rows < 4096 ? 32
                     : static_cast<int64_t>(std::min(std::bit_floor(static_cast<uint64_t>(rows) / 1024), uint64_t{32}));
}
inline constexpr int64_t kPartialsPerRun = 32;

struct Columns {
  int64_t rows = 0;
  int length = 0;  // columns
  int64_t rows_per_thread = 1;
  template <class T>
  Grid grid() const {
    return {.blocks = blocks_for(blocks_for(length, kVecElems<T>) * blocks_for(rows, rows_per_thread), kThreads)};
  }
};

struct ColumnThread {
  int j = 0;  // first column
  int64_t first = 0, last = 0;
  int64_t run = 0;
};

template <class T>
__device__ ColumnThread column_thread(const Columns& c) {
  const int64_t vectors = (c.length + kVecElems<T> - 1) / kVecElems<T>, run = global_thread() / vectors;
  const int64_t first = run * c.rows_per_thread;
  return {static_cast<int>(global_thread() % vectors) * kVecElems<T>, first,
          std::min(first + c.rows_per_thread, c.rows), run};
}

template <bool kVectorized, class T, class A>
__device__ void store_sums(A* row, int j, int length, const A* sums) {
  if constexpr (kVectorized) {
    for (int p = 0; p < kVecElems<T>; p += kVecElems<A>) {
      Packed<A, kVecElems<A>> chunk;
      for (int k = 0; k < kVecElems<A>; ++k) chunk.v[k] = sums[p + k];
      store(row + j + p, chunk);
    }
  } else {
    for (int k = 0; k < kVecElems<T> && j + k < length; ++k) row[j + k] = sums[k];
  }
}

inline constexpr int kMaxRuns = 32;

template <class U>
struct SumsTo {
  U* to[2] = {};
  bool adds[2] = {};
};

// Sums `count` rows of each array: runs of 32 rows in order, then their sums. A block processes 32 columns of one
// array, with one warp per run and at most kMaxRuns runs at a time.
template <class A, class U>
__global__ __launch_bounds__(32 * kMaxRuns) void add_partials_kernel(const A* arrays, int64_t count, int c,
                                                                     const __grid_constant__ SumsTo<U> out) {
  __shared__ A run[kMaxRuns][32];
  const int runs = static_cast<int>(blockDim.x) / 32, across = (c + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, own = static_cast<int>(threadIdx.x) / 32;
  const int which = static_cast<int>(blockIdx.x) / across;
  const int64_t j = static_cast<int64_t>(static_cast<int>(blockIdx.x) % across) * 32 + lane;
  const A* const partials = arrays + which * count * c;
  A total = 0;
  for (int64_t first = 0; first < count; first += runs * kPartialsPerRun) {
    const int64_t begin = first + own * kPartialsPerRun, end = std::min(begin + kPartialsPerRun, count);
    A sum = 0;
    if (j < c) {
      constexpr int kInFlight = 16;
#pragma unroll
      for (int k = 0; k < kPartialsPerRun; k += kInFlight) {
        A loaded[kInFlight];
#pragma unroll
        for (int e = 0; e < kInFlight; ++e) loaded[e] = begin + k + e < end ? partials[(begin + k + e) * c + j] : A(0);
#pragma unroll
        for (int e = 0; e < kInFlight; ++e) sum += loaded[e];
      }
    }
    run[own][lane] = sum;
    __syncthreads();
    if (own == 0)
      for (int r = 0; r < runs && first + r * kPartialsPerRun < count; ++r) total += run[r][lane];
    __syncthreads();
  }
  if (own != 0 || j >= c) return;
  U* const to = out.to[which] + j;
  const U fresh = converted<U>(total);
  *to = out.adds[which] ? U(static_cast<Accumulate<U>>(*to) + static_cast<Accumulate<U>>(fresh)) : fresh;
}

// Second pass: partials (arrays, count, C) -> targets (C) with any floating dtype and strides (RowSum of
// tensor/ops/reduce.h); one launch if their dtypes are equal.
template <class A, class Sum>
void add_partials(const char* op, std::span<Sum> to, const Tensor& partials) {
  const int64_t count = partials.dim(1), c = partials.dim(2);
  if (to.size() == 2 && to[0].to.dtype() != to[1].to.dtype()) {
    add_partials<A>(op, to.first(1), partials);
    return add_partials<A>(op, to.last(1), partials.narrow(0, 1, 1));
  }
  std::array<Tensor, 2> dense;
  with_floating(to[0].to.dtype(), op, [&](auto u) {
    using U = decltype(u);
    SumsTo<U> out;
    for (size_t i = 0; i < to.size(); ++i) {
      dense[i] = to[i].to.contiguous();
      out.to[i] = dense[i].template device_data<U>();
      out.adds[i] = to[i].adds;
    }
    const auto runs = static_cast<int>(std::clamp<int64_t>(blocks_for(count, kPartialsPerRun), 1, kMaxRuns));
    launch(context(partials), op, {.blocks = std::ssize(to) * blocks_for(c, 32), .threads = 32 * runs},
           add_partials_kernel<A, U>, partials.device_data<A>(), count, static_cast<int>(c), out);
  });
  for (size_t i = 0; i < to.size(); ++i)
    if (!to[i].to.is_contiguous()) Tensor(to[i].to).copy_from(dense[i]);
}
template <class A>
void add_partials(const char* op, const Tensor& out, const Tensor& partials) {
  struct Sum {
    Tensor to;
    bool adds = false;
  } one{out};
  add_partials<A>(op, std::span<Sum>(&one, 1), partials);
}

template <class A>
Tensor make_partials(const Tensor& like, int64_t rows, int64_t c, int64_t arrays = 1) {
  return like.make({arrays, blocks_for(rows, rows_per_run(rows)), c}, kDTypeOf<A>, Category::workspace);
}

// Position passed to an op's function object: rows [first, last) and columns [j, j + kVecElems<T>).
template <class T, bool kVectorized>
struct ColumnPosition {
  int64_t first, last, run;
  int j, length;

  using Elements = Packed<T, kVecElems<T>>;
  __device__ Elements load(const T* matrix, int64_t row = 0) const {
    return load_vector<kVectorized>(matrix + row * length, j, length);
  }
  __device__ void store(T* matrix, int64_t row, const Elements& packed) const {
    store_vector<kVectorized>(matrix + row * length, j, length, packed);
  }
  template <class A>
  __device__ void store_sums(A* partials, const Packed<A, kVecElems<T>>& sums) const {
    cuda::store_sums<kVectorized, T>(partials + run * length, j, length, sums.v);
  }
};

template <class T, bool kVectorized, class F>
__global__ void columns_kernel(const F f, const Columns columns) {
  const ColumnThread at = column_thread<T>(columns);
  if (at.first < columns.rows) f(ColumnPosition<T, kVectorized>{at.first, at.last, at.run, at.j, columns.length});
}

// `operands`: the pointers (or null) that ColumnPosition loads and stores.
template <class T, class F, class... P>
void for_columns(Context& c, const char* op, const Columns& columns, const F& f, const P*... operands) {
  const bool vectorized = is_vectorizable<T>(columns.length, operands...);
  launch(c, op, columns.grid<T>(), vectorized ? columns_kernel<T, true, F> : columns_kernel<T, false, F>, f, columns);
}

}  // namespace tessera::cuda
