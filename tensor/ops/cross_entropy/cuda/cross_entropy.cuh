// What the kernels of the cross-entropy share: logits with their targets, exponentials, and what a row adds to the
// loss.
//
// The exponentials are the most of any in a training step. They are CUDA's own, which are good to 1 unit in the last
// place as math::exp() is and cost a third of it; of bfloat16 logits a fast one, without which the kernels would
// calculate for as long as they read.
#pragma once
#include <type_traits>

#include "tensor/cuda/fast_exp.cuh"
#include "tensor/cuda/indices.cuh"
#include "tensor/cuda/rows.cuh"
#include "tensor/math.h"
#include "tensor/ops/cross_entropy/cross_entropy.h"

namespace tessera::cuda {

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }

// exp(x - y).
template <class T>
__device__ Accumulate<T> exponential_from(T x, Accumulate<T> y) {
  constexpr float kLog2OfE = 1.44269504f;
  if constexpr (std::is_same_v<T, bfloat16>)
    return fast_exp2((static_cast<float>(x) - y) * kLog2OfE);  // the difference first: of -inf it is no NaN
  else
    return exponential(x - y);
}

inline constexpr int kPartsEach = 8;  // parts of a row for a thread, about

template <class T>
struct Logits {
  const T* x;
  const int32_t* targets;
  Rows rows;
  Bounds bounds;  // of all targets
  int64_t first;  // of the columns here
};

template <class T>
Logits<T> logits_of(const Tensor& x, const Tensor& targets, const VocabPart& part) {
  const int64_t vocab = part.whole > 0 ? part.whole : x.dim(1);
  return {x.device_data<T>(), targets.device_data<int32_t>(), rows_of<T>(x.dim(0), x.dim(1), kPartsEach),
          context(x).bounds({.op = "cross_entropy", .what = "target", .where = "of row", .limit = vocab}), part.first};
}

// The column of row i's target, or -1 where it is ignored or not here.
template <class T>
__device__ int column_of(const Logits<T>& f, int64_t i, int32_t target) {
  if (target == kIgnoredTarget || !inside(f.bounds, i, target)) return -1;
  const int64_t at = target - f.first;
  return at >= 0 && at < f.rows.length ? static_cast<int>(at) : -1;
}

// What a row adds to the loss, and to the number of target tokens.
template <class A>
__device__ void store_loss(double* losses, const Rows& rows, int64_t i, A lse, A logit, bool counts) {
  losses[i] = counts ? static_cast<double>(lse) - static_cast<double>(logit) : 0;
  losses[rows.count + i] = counts ? 1 : 0;
}

inline RowLosses room_for(const Tensor& like, int64_t n, DType wide) {
  return {like.make({n}, wide), like.make({2, n}, DType::float64), like.make({2}, DType::float64)};
}

}  // namespace tessera::cuda
