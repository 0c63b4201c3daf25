// The frame of kernels whose threads have the 16 bytes of some neighbouring columns in some rows (columns.cuh). An op
// says what such a thread does, as a struct that is called with the thread's place.
#pragma once
#include <cstdint>

#include "tensor/cuda/columns.cuh"

namespace tessera::cuda {

// Rows [first, last) and columns [j, j + kPart<T>) of matrices with rows of `length`.
template <class T, bool kWhole>
struct ColumnPart {
  int64_t first, last, run;
  int j, length;

  using Elements = Packed<T, kPart<T>>;
  __device__ Elements load(const T* matrix, int64_t row = 0) const {
    return load_part<kWhole>(matrix + row * length, j, length);
  }
  __device__ void store(T* matrix, int64_t row, const Elements& part) const {
    store_part<kWhole>(matrix + row * length, j, length, part);
  }
  // Stores the thread's sums over its rows, in (runs, length).
  template <class A>
  __device__ void store_sums(A* parts, const Packed<A, kPart<T>>& sums) const {
    cuda::store_sums<kWhole, T>(parts + run * length, j, length, sums.v);
  }
};

template <class T, bool kWhole, class F>
__global__ void columns_kernel(const F f, const Columns columns) {
  const ColumnThread at = column_thread<T>(columns);
  if (at.first < columns.rows) f(ColumnPart<T, kWhole>{at.first, at.last, at.run, at.j, columns.length});
}

// Queues f for all places of matrices of T; `operands` are those (or null) that ColumnPart loads and stores.
template <class T, class F, class... P>
void for_columns(Context& c, const char* op, const Columns& columns, const F& f, const P*... operands) {
  const auto queue = [&](auto whole) {
    launch(c, op, columns.grid<T>(), columns_kernel<T, decltype(whole)::value, F>, f, columns);
  };
  with_parts<T>(columns.length, queue, operands...);
}

}  // namespace tessera::cuda
