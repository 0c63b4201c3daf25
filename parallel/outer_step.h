// DiLoCo's outer step for one element.
#pragma once
#include "tensor/math.h"
#include "tensor/tensor.h"

namespace tessera {

struct OuterOptions {
  double lr = 0.7, momentum = 0.9;
};

template <class W>
struct OuterStep {
  W fraction, momentum, outer_lr;  // 1 / ranks, mu, outer_lr

  template <class T>
  OuterStep<T> as() const {
    return {static_cast<T>(fraction), static_cast<T>(momentum), static_cast<T>(outer_lr)};
  }
  // `sum` is the reduced difference; `buffer` is the momentum or null.
  constexpr void operator()(W sum, W* buffer, W& common) const {
    W step = fraction * sum;
    if (buffer) {
      *buffer = math::fma(momentum, *buffer, step);
      step = math::fma(momentum, *buffer, step);
    }
    common = math::fma(-outer_lr, step, common);
  }
};

inline OuterStep<double> make_outer_step(int replicas, const OuterOptions& o) {
  return {1.0 / replicas, o.momentum, o.lr};
}

// For fp32 or fp64 values; `own` may reside in pinned host memory. Kernels are queued on the stream of `sums`.
namespace cuda {
void differences(const Tensor& sums, const Tensor& common, const Tensor& own);  // common - own
// Updates `common` and the momentum (may be undefined) from the reduced differences; then own = common.
void outer_step(const Tensor& common, const Tensor& momentum, const Tensor& own, const Tensor& sums,
                const OuterStep<double>& step);
}  // namespace cuda

}  // namespace tessera
