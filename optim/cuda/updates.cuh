// What kernels of updates share. State or values that are offloaded lie in the host's pinned memory, and come and go
// over the bus as any other operand.
#pragma once
#include "optim/cuda/segments.cuh"
#include "optim/updates.h"

namespace tessera::cuda {

template <class W, int N>
__device__ void round_to(bfloat16* values, int64_t i, const Packed<W, N>& p) {
  Packed<bfloat16, N> rounded;
  for (int k = 0; k < N; ++k) rounded.v[k] = bfloat16(p.v[k]);
  store(values + i, rounded);
}
// Other values are what was updated.
template <class W, int N>
__device__ void round_to(W*, int64_t, const Packed<W, N>&) {}

// The constants for a slot; false where nothing is to be updated.
template <class Step>
__device__ bool constants_of(Step& step, const UpdateNumbers* now, bool decay) {
  if (now && now->skip) return false;
  step = (now ? step.at(*now) : step).of_slot(decay);
  return true;
}

// The address that a kernel has for what may be offloaded: of the GPU's memory, or of the host's pinned memory.
template <class W>
W* reached_data(const Tensor& t) {
  return t.device() == Device::cuda ? t.device_data<W>() : t.data<W>();
}

// Calls f(V{}, G{}) for units whose state is of type W.
template <class W, class F>
void with_types(const FlatUnit& unit, const F& f) {
  with_unit_types(unit, [&](auto value, auto grad) {
    if constexpr (!kHasKernels<decltype(value)> || !kHasKernels<decltype(grad)>)
      refuse_float64(DType::float64, "optimizer");
    else if constexpr (std::is_same_v<Accumulate<decltype(value)>, W>)
      f(value, grad);
  });
}

}  // namespace tessera::cuda
