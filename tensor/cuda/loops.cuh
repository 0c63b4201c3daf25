// Elementwise ops on a GPU over broadcast, strided operands.
//
// Operands contiguous at least in their last dim are accessed 16 bytes at a time. The result for an
// element does not depend on the kernel (vectorized or not) or on its position.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "tensor/cuda/launch.cuh"
#include "tensor/tensor.h"

namespace tessera::cuda {

template <class T, int N>
struct alignas(N * sizeof(T)) Packed {
  T v[N];
};

template <int N, class T>
__device__ Packed<T, N> load(const T* from) {
  return *reinterpret_cast<const Packed<T, N>*>(from);
}
template <class T, int N>
__device__ void store(T* to, const Packed<T, N>& packed) {
  *reinterpret_cast<Packed<T, N>*>(to) = packed;
}

// Elements per thread: 16 bytes of the widest type.
template <class... T>
inline constexpr int kPerThread = static_cast<int>(16 / std::max({sizeof(T)...}));

__device__ inline int64_t global_thread() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

template <class F, class Y, class... X>
__global__ void flat_kernel(F f, int64_t n, Y* y, const X*... x) {
  constexpr int kN = kPerThread<Y, X...>;
  const int64_t first = global_thread() * kN;
  if (first + kN <= n) {
    const auto apply_vector = [&](const Packed<X, kN>&... in) {
      Packed<Y, kN> out;
      for (int k = 0; k < kN; ++k) out.v[k] = f(in.v[k]...);
      store(y + first, out);
    };
    apply_vector(load<kN>(x + first)...);
  } else {
    for (int64_t i = first; i < n; ++i) y[i] = f(x[i]...);
  }
}

struct Strided {
  int rank = 0;
  int64_t n = 0;
  int64_t size[kMaxDims] = {};
  int64_t step[kMaxOperands][kMaxDims] = {};
};

template <int kN, class F, class Y, class... X>
__global__ void strided_kernel(F f, Strided s, Y* y, const X*... x) {
  const int64_t i = global_thread();
  if (i >= s.n) return;
  int64_t at[1 + sizeof...(X)] = {};
  int64_t rest = i;
  for (int d = s.rank - 1; d >= 0; --d) {
    const int64_t coordinate = rest % s.size[d];
    rest /= s.size[d];
    for (int k = 0; k <= static_cast<int>(sizeof...(X)); ++k) at[k] += coordinate * s.step[k][d];
  }
  const auto of_all = [&](const Packed<X, kN>&... in) {
    Packed<Y, kN> out;
    for (int k = 0; k < kN; ++k) out.v[k] = f(in.v[k]...);
    store(y + at[0], out);
  };
  const auto apply = [&]<size_t... K>(std::index_sequence<K...>) { of_all(load<kN>(x + at[1 + K])...); };
  apply(std::index_sequence_for<X...>{});
}

template <class... T>
Strided strided(const MergedDims& dims) {
  Strided s{.rank = dims.shape.ndim(), .n = dims.shape.numel()};
  for (int d = 0; d < s.rank; ++d) {
    s.size[d] = dims.shape[d];
    for (size_t k = 0; k < sizeof...(T); ++k) s.step[k][d] = dims.strides[k][d];
  }
  return s;
}

template <class... T>
Strided of_vectors(Strided s, int n) {
  s.n /= n;
  s.size[s.rank - 1] /= n;
  for (size_t k = 0; k < sizeof...(T); ++k) s.step[k][s.rank - 1] *= n;
  return s;
}

template <class... T>
bool aligned(const T*... pointers) {
  constexpr int kN = kPerThread<T...>;
  return ((reinterpret_cast<uintptr_t>(pointers) % (kN * sizeof(T)) == 0) && ...);
}

template <class... T>
bool runs_on(const MergedDims& dims, const T*... pointers) {
  if (dims.shape.ndim() != 1) return false;
  for (size_t k = 0; k < sizeof...(T); ++k)
    if (dims.strides[k][0] != 1 && dims.shape[0] != 1) return false;
  return aligned(pointers...);
}

template <class... T>
bool rows_run_on(const Strided& s, const T*... pointers) {
  constexpr int kN = kPerThread<T...>;
  if (s.rank == 0 || s.size[s.rank - 1] % kN != 0) return false;
  for (size_t k = 0; k < sizeof...(T); ++k) {
    if (s.step[k][s.rank - 1] != 1) return false;
    for (int d = 0; d + 1 < s.rank; ++d)
      if (s.step[k][d] % kN != 0) return false;
  }
  return aligned(pointers...);
}

// y = f(x...): map<Y, X...>(op, f, y, x...) with explicit element types; operands have y's shape.
template <class Y, class... X, class F, class... In>
void map(const char* op, const F& f, const Tensor& y, const In&... in) {
  static_assert(sizeof...(X) == sizeof...(In));
  if (y.numel() == 0) return;
  Context& c = context(y);
  const MergedDims dims = merged_dims(std::array<const Tensor*, 1 + sizeof...(In)>{&y, &in...});
  Y* const to = y.device_data<Y>();
  if (runs_on(dims, to, static_cast<const X*>(in.template device_data<X>())...)) {
    const int64_t n = y.numel();
    launch(c, op, {.blocks = blocks_for(n, int64_t{kThreads} * kPerThread<Y, X...>)}, flat_kernel<F, Y, X...>, f, n, to,
           in.template device_data<X>()...);
  } else {
    const Strided s = strided<Y, X...>(dims);
    constexpr int kN = kPerThread<Y, X...>;
    if (rows_run_on(s, to, static_cast<const X*>(in.template device_data<X>())...))
      launch(c, op, {.blocks = blocks_for(s.n / kN, kThreads)}, strided_kernel<kN, F, Y, X...>, f,
             of_vectors<Y, X...>(s, kN), to, in.template device_data<X>()...);
    else
      launch(c, op, {.blocks = blocks_for(s.n, kThreads)}, strided_kernel<1, F, Y, X...>, f, s, to,
             in.template device_data<X>()...);
  }
}

}  // namespace tessera::cuda
