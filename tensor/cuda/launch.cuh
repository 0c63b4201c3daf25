// Kernel launches on the stream of an arena.
#pragma once
#include <cstdint>
#include <string>
#include <type_traits>

#include "tensor/cuda/context.h"

namespace tessera::cuda {

// The macro is defined only for .cu files, so that a change recompiles nothing else (cmake/tessera.cmake).
inline constexpr bool kFloat64Kernels = TESSERA_FLOAT64_KERNELS;
template <class T>
inline constexpr bool kHasKernels = kFloat64Kernels || !std::is_same_v<T, double>;

[[noreturn]] inline void reject_float64(DType dtype, const char* op) {
  throw Error("[" + std::string(op) + "] dtype is " + std::string(to_string(dtype)) +
              "; expected float32 or bfloat16, since this program was built without float64 kernels "
              "(-DTESSERA_FLOAT64_KERNELS=ON)");
}

// tessera::with_floating() for kernels that a build may omit. Preferred in this namespace because it is more
// constrained; for kernels present in every build, qualify the call.
template <class F>
requires(std::is_class_v<std::remove_cvref_t<F>>) decltype(auto) with_floating(DType dtype, const char* op, F&& f) {
  if constexpr (kFloat64Kernels) {
    return tessera::with_floating(dtype, op, f);
  } else {
    if (dtype == DType::bfloat16) return f(bfloat16{});
    if (dtype != DType::float32) reject_float64(dtype, op);
    return f(float{});
  }
}

inline constexpr int kThreads = 256;  // per block

struct Grid {
  int64_t blocks = 0;
  int threads = kThreads;
  int shared = 0;  // bytes of dynamic shared memory
};

// No-op for an empty grid; at most 2^31 - 1 blocks.
template <class... Parameters, class... Args>
void launch(Context& c, const char* op, const Grid& grid, void (*kernel)(Parameters...), const Args&... args) {
  if (grid.blocks == 0) return;
  if (grid.shared > 48 * 1024)
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               grid.shared),
          op);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared);
  config.stream = c.stream();
  c.queued(op, cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(args)...));
}

constexpr int64_t blocks_for(int64_t n, int64_t per_block) { return (n + per_block - 1) / per_block; }

// Whether `value`, at position `place` < 2^32, is a valid index; records invalid ones.
__device__ inline bool inside(const Bounds& bounds, int64_t place, int32_t value) {
  if (value >= 0 && value < bounds.limit) return true;
  atomicMin(bounds.first, static_cast<unsigned long long>(place) << 32 | static_cast<uint32_t>(value));
  return false;
}

}  // namespace tessera::cuda
