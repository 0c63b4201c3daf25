// The GPU that a test uses, or the reason why it is skipped.
#pragma once
#include <gtest/gtest.h>

#include <string>

#include "tensor/arena.h"
#include "tensor/cuda/gpus.h"

namespace tessera::test {

// Empty where a test can use a GPU; otherwise why not.
inline std::string no_gpu() {
  if constexpr (!kWithCuda)
    return "a build without CUDA";
  else
    return cuda::gpu_count() > 0 ? "" : "this machine has no GPU";
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
