// Several GPUs for a test, or the reason why it is skipped. Where CUDA is emulated, so are they.
#pragma once
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "parallel/comm/backends.h"
#include "tests/support/gpu.h"

namespace tessera::test {

// Tests of ranks with a GPU each that speak over NCCL.
class OnGpus : public testing::Test {
 protected:
  void SetUp() override {
    if (!kWithNccl) GTEST_SKIP() << "a build without NCCL";
    setenv("TESSERA_EMULATED_GPUS", "4", 1);  // nothing to a real one
    if constexpr (kWithCuda) gpus = cuda::gpu_count();
    if (gpus < 2) GTEST_SKIP() << "this machine has no two GPUs";
  }
  void TearDown() override { unsetenv("TESSERA_EMULATED_GPUS"); }
  int gpus = 0;
};

}  // namespace tessera::test
