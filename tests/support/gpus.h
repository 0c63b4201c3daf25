// Several GPUs for a test, or the reason for skipping it. Under CUDA emulation they are emulated.
#pragma once

#include <cstdlib>
#include <string>

#include "parallel/comm/launch.h"
#include "tests/support/gpu.h"

namespace tessera::test {

// Emulates four GPUs (without effect on real ones) and returns the reason for skipping a test with that many NCCL
// ranks; empty if it can run.
inline std::string no_gpus(int wanted) {
  if (!kWithNccl) return "a build without NCCL";
  setenv("TESSERA_EMULATED_GPUS", "4", 1);
  int found = 0;
  if constexpr (kWithCuda) found = cuda::gpu_count();
  return found < wanted
             ? "this machine has " + std::to_string(found) + " GPUs, and " + std::to_string(wanted) + " are wanted"
             : "";
}
inline void forget_emulated_gpus() { unsetenv("TESSERA_EMULATED_GPUS"); }

class OnGpus : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = no_gpus(2); !why.empty()) GTEST_SKIP() << why;
    if constexpr (kWithCuda) gpus = cuda::gpu_count();
  }
  void TearDown() override { forget_emulated_gpus(); }
  int gpus = 0;
};

}  // namespace tessera::test
