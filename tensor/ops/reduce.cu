// GPU sums. Training steps use only sum_rows(); the others are bitwise identical to the CPU's.
#include <algorithm>
#include <cstdint>

#include "tensor/cuda/columns.cuh"
#include "tensor/ops/reduce.h"

namespace tessera::cuda {

namespace {

template <class T>
struct ColumnSums {
  const T* x;
  Accumulate<T>* partials;

  template <class Position>
  __device__ void operator()(const Position& at) const {
    Packed<Accumulate<T>, kVecElems<T>> total{};
#pragma unroll 4
    for (int64_t i = at.first; i < at.last; ++i) {
      const auto packed = at.load(x, i);
      for (int k = 0; k < kVecElems<T>; ++k) total.v[k] += static_cast<Accumulate<T>>(packed.v[k]);
    }
    at.store_sums(partials, total);
  }
};

constexpr int kStaged = 4096;  // elements at a time; the CPU's block size

// out[r] = run r of a row of x, summed in order. The block stages the elements; one thread adds them.
template <class T, class U>
__global__ void add_in_order_kernel(const T* x, int64_t n, int64_t run, U* out) {
  __shared__ double staged[kStaged];
  const int64_t runs = (n + run - 1) / run, r = blockIdx.x;
  const T* const row = x + r / runs * n;
  const int64_t begin = r % runs * run, end = std::min(n, begin + run);
  double total = 0;
  for (int64_t first = begin; first < end; first += kStaged) {
    const int count = static_cast<int>(std::min<int64_t>(kStaged, end - first));
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
      staged[i] = static_cast<double>(static_cast<Accumulate<T>>(row[first + i]));
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll 8
      for (int i = 0; i < count; ++i) total += staged[i];
    }
  }
  if (threadIdx.x == 0) out[r] = converted<U>(total);
}

// Dims of x, unreduced before reduced ones, each group in x's order.
struct SummedDims {
  int unreduced = 0, rank = 0;
  int64_t size[kMaxDims] = {}, step[kMaxDims] = {};
  int64_t outputs = 0, terms = 1;
};

__device__ int64_t element_offset(const SummedDims& s, int64_t i, int from, int to) {
  int64_t at = 0;
  for (int d = to - 1; d >= from; --d) {
    at += i % s.size[d] * s.step[d];
    i /= s.size[d];
  }
  return at;
}

template <class T>
__global__ void sum_to_kernel(const T* x, const __grid_constant__ SummedDims s, T* out) {
  using A = Accumulate<T>;
  const int64_t i = global_thread();
  if (i >= s.outputs) return;
  const T* const first = x + element_offset(s, i, 0, s.unreduced);
  A total = 0;
  for (int64_t t = 0; t < s.terms; ++t) total += static_cast<A>(first[element_offset(s, t, s.unreduced, s.rank)]);
  out[i] = T(total);
}

SummedDims summed_dims(const Tensor& x, const Shape& shape) {
  SummedDims s{.outputs = shape.numel()};
  const auto add = [&](bool summed) {
    for (int d = 0; d < x.ndim(); ++d) {
      const int own = d - (x.ndim() - shape.ndim());
      if ((own < 0 || shape[own] != x.shape()[d]) != summed) continue;
      s.size[s.rank] = x.shape()[d];
      s.step[s.rank++] = x.strides()[d];
      if (summed) s.terms *= x.shape()[d];
    }
  };
  add(false);
  s.unreduced = s.rank;
  add(true);
  return s;
}

}  // namespace

void sum_rows(const Tensor& out, const Tensor& x) {
  const int64_t n = x.dim(0), c = x.dim(1);
  with_floating(x.dtype(), "sum_rows", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const Tensor partials = make_partials<A>(x, n, c);
    const ColumnSums<T> f{x.device_data<T>(), partials.device_data<A>()};
    for_columns<T>(context(x), "sum_rows", {n, static_cast<int>(c), rows_per_run(n)}, f, f.x);
    add_partials<A>("sum_rows", out, partials);
  });
}

void sum_partials(const Tensor& out, const Tensor& partials) {
  if (partials.dtype() == DType::float64)
    add_partials<double>("sum_rows", out, partials);
  else
    add_partials<float>("sum_rows", out, partials);
}

void sums(const char* op, const Tensor& out, const Tensor& x) {
  const int64_t rows = x.dim(0), n = x.dim(1), runs = blocks_for(n, kStaged);
  if (n == 0) return Tensor(out).fill(0);
  const Tensor partials = x.make({rows, runs}, DType::float64, Category::workspace);
  double* const data = partials.device_data<double>();
  tessera::with_floating(x.dtype(), op, [&](auto t) {
    using T = decltype(t);
    launch(context(x), op, {.blocks = rows * runs}, add_in_order_kernel<T, double>, x.device_data<T>(), n,
           int64_t{kStaged}, data);
  });
  tessera::with_floating(out.dtype(), op, [&](auto u) {
    using U = decltype(u);
    launch(context(x), op, {.blocks = rows}, add_in_order_kernel<double, U>, data, runs, runs, out.device_data<U>());
  });
}

void sum_to(const Tensor& out, const Tensor& x) {
  const SummedDims s = summed_dims(x, out.shape());
  with_floating(x.dtype(), "sum_to", [&](auto t) {
    using T = decltype(t);
    launch(context(x), "sum_to", {.blocks = blocks_for(s.outputs, kThreads)}, sum_to_kernel<T>, x.device_data<T>(), s,
           out.device_data<T>());
  });
}

}  // namespace tessera::cuda
