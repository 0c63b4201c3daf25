// The GPU of a test, or the reason for skipping it.
#pragma once
#include <gtest/gtest.h>

#include <iostream>
#include <string>
#include <vector>

#include "tensor/cuda/gpus.h"
#include "tensor/dtype.h"

namespace tessera::test {

// Empty if a GPU is available; otherwise the reason.
inline std::string no_gpu() {
  if constexpr (!kWithCuda)
    return "a build without CUDA";
  else
    return cuda::gpu_count() > 0 ? "" : "this machine has no GPU";
}

// Empty if the GPU has float64 kernels; otherwise the reason.
inline std::string no_float64() {
  if constexpr (kWithCuda)
    if (!cuda::has_float64_kernels()) return "a build with -DTESSERA_FLOAT64_KERNELS=OFF";
  return "";
}

// Whether ops support the dtype on the device; prints a line if the build excludes it.
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

// Whether timing or library choices are emulated, and therefore deterministic.
inline bool emulated() {
  if constexpr (kWithCuda) return cuda::describe_gpu().find("emulated") != std::string::npos;
  return false;
}

// Fixture of tests whose names end in Gpu: skips them with the reason if there is no GPU.
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
