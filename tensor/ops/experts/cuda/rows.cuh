// Products for any number of rows on a GPU: what kernels of all types share. A line is a row of the left factor or a
// column of the right one; each element of the product is a sum over the inner dim of two lines.
#pragma once
#include <type_traits>

#include "tensor/cuda/launch.cuh"
#include "tensor/ops/experts/rows.h"

namespace tessera::cuda {

template <class T, class Out>
struct RowsCall {
  const T *left, *right;
  Out* out;
  int rows, columns, inner;
};

template <class T, class Out>
RowsCall<T, Out> rows_call(const Tensor& out, const Tensor& left, const Tensor& right, int64_t inner) {
  return {left.device_data<T>(),        right.device_data<T>(),       out.device_data<Out>(),
          static_cast<int>(out.dim(0)), static_cast<int>(out.dim(1)), static_cast<int>(inner)};
}

// Where a block's tile of the product begins. Neighbouring blocks have the same lines of the right factor.
struct TileStart {
  int row, column;
};
template <int kTile, class Call>
__device__ TileStart tile_start(const Call& call) {
  const int down = (call.rows + kTile - 1) / kTile, block = static_cast<int>(blockIdx.x);
  return {block % down * kTile, block / down * kTile};
}
template <class Call>
int64_t tiles_in(const Call& call, int64_t tile) {
  return blocks_for(call.rows, tile) * blocks_for(call.columns, tile);
}

// Smaller tiles where larger ones would leave multiprocessors without a block. An element's bits are the same in both.
inline constexpr int64_t kFewBlocks = 128;

// Calls f(whether a line of the left factor lies side by side, whether one of the right factor does).
template <class F>
void with_lines(RowsProduct which, const F& f) {
  if (which == RowsProduct::forward)
    f(std::true_type{}, std::true_type{});
  else if (which == RowsProduct::input_grad)
    f(std::true_type{}, std::false_type{});
  else
    f(std::false_type{}, std::false_type{});
}

// On tensor cores (rows_bf16.cu).
void multiply_rows_bf16(RowsProduct which, const Tensor& out, const Tensor& left, const Tensor& right, int64_t inner);

}  // namespace tessera::cuda
