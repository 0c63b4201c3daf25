// The GPU that a test uses, or the reason why it is skipped.
#pragma once
#include <gtest/gtest.h>

#include "tensor/cuda/gpus.h"
#include "tensor/dtype.h"

namespace tessera::test {

// Empty where a test can use a GPU; otherwise why not.
inline std::string no_gpu() {
  if constexpr (!kWithCuda)
    return "a build without CUDA";
  else
    return cuda::gpu_count() > 0 ? "" : "this machine has no GPU";
}

// Empty where ops of float64 tensors have kernels on the GPU; otherwise why not.
inline std::string no_float64() {
  if constexpr (kWithCuda)
    if (!cuda::has_float64_kernels()) return "a build with -DTESSERA_FLOAT64_KERNELS=OFF";
  return "";
}

// Whether ops take numbers of that dtype on that device; where a build leaves them out, a line says so.
inline bool has_kernels(DType dtype, Device device) {
  if (dtype != DType::float64 || device == Device::cpu || no_float64().empty()) return true;
  std::cout << "[ LEFT OUT ] float64: " << no_float64() << "\n";
  return false;
}
inline std::vector<DType> floating(const ArenaPtr& arena) {
  std::vector<DType> dtypes = {DType::float64, DType::float32, DType::bfloat16};
  std::erase_if(dtypes, [&](DType dtype) { return !has_kernels(dtype, arena->device()); });
  return dtypes;
}

// Where a clock or a library decides, tests of the emulated GPU know what comes of it.
inline bool emulated() {
  if constexpr (kWithCuda) return cuda::describe_gpu().find("emulated") != std::string::npos;
  return false;
}

// Tests whose names end in Gpu: each is skipped with the reason where there is no GPU, never passed over in silence.
class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = no_gpu(); !why.empty())
      GTEST_SKIP() << why;
    else
      arena = make_arena(Device::cuda);
  }
  ArenaPtr arena;
};

}  // namespace tessera::test
