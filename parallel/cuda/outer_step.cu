// DiLoCo's outer step, with one thread per element because outer steps are rare.
#include <cstdint>

#include "optim/rules.h"
#include "parallel/outer_step.h"
#include "tensor/cuda/loops.cuh"

namespace tessera::cuda {

namespace {

template <class G, class W>
__global__ void differences_kernel(int64_t n, const W* common, const W* own, G* differences) {
  const int64_t i = global_thread();
  if (i < n) differences[i] = converted<G>(common[i] - own[i]);
}

template <class G, class W>
__global__ void outer_step_kernel(int64_t n, OuterStep<W> step, const G* sums, W* momentum, W* common, W* own) {
  const int64_t i = global_thread();
  if (i >= n) return;
  W value = common[i];
  step(static_cast<W>(sums[i]), momentum ? momentum + i : nullptr, value);
  common[i] = own[i] = value;
}

// Calls f(G{}, W{}) with the dtypes of `sums` and `common`.
template <class F>
void with_both(const Tensor& sums, const Tensor& common, const F& f) {
  with_wide(common, [&](auto w) { with_floating(sums.dtype(), "diloco", [&](auto g) { f(g, w); }); });
}

}  // namespace

void differences(const Tensor& sums, const Tensor& common, const Tensor& own) {
  with_both(sums, common, [&](auto g, auto w) {
    using G = decltype(g);
    using W = decltype(w);
    launch(context(sums), "differences", {.blocks = blocks_for(sums.numel(), kThreads)}, differences_kernel<G, W>,
           sums.numel(), common.device_data<W>(), reached_data<W>(own), sums.device_data<G>());
  });
}

void outer_step(const Tensor& common, const Tensor& momentum, const Tensor& own, const Tensor& sums,
                const OuterStep<double>& step) {
  with_both(sums, common, [&](auto g, auto w) {
    using G = decltype(g);
    using W = decltype(w);
    W* const buffer = momentum.defined() ? momentum.device_data<W>() : nullptr;
    launch(context(sums), "outer step", {.blocks = blocks_for(sums.numel(), kThreads)}, outer_step_kernel<G, W>,
           sums.numel(), step.as<W>(), sums.device_data<G>(), buffer, common.device_data<W>(), reached_data<W>(own));
  });
}

}  // namespace tessera::cuda
