// Failures that are expected leave nothing behind in the runtime's last error, where NVIDIA's libraries look after
// their launches and would take it for their own.

#include <cstdlib>

#include "parallel/comm/cuda/streams.h"
#include "tensor/cuda/context.h"
#include "tests/cuda_emulator/streams.h"
#include "tests/support/errors.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using FailuresGpu = test::OnGpu;

TEST_F(FailuresGpu, LeaveNothingWhereNoGpuIs) {
  setenv("TESSERA_EMULATED_GPUS", "0", 1);
  EXPECT_EQ(cuda::gpu_count(), 0);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_THROW(cuda::use_gpu(0), Error);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  int count = 0;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorNoDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNoDevice) << "the emulated runtime remembers nothing";
  unsetenv("TESSERA_EMULATED_GPUS");
}

TEST_F(FailuresGpu, WhyThereIsNoGpuIsOneLine) {
  const std::pair<const char*, std::string> cases[] = {
      {"no driver", "this machine has no NVIDIA driver, or the container does not reach it"},
      {"old driver", "the NVIDIA driver is for CUDA 12.4, older than this program's CUDA 13.0"},
      {"0", "the NVIDIA driver lists none"}};
  for (const auto& [gpus, why] : cases) {
    setenv("TESSERA_EMULATED_GPUS", gpus, 1);
    EXPECT_EQ(error_of([] { cuda::use_gpu(0); }),
              "`device` cuda: no GPU was found: " + why + "; `device` cpu runs everything without one");
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
  unsetenv("TESSERA_EMULATED_GPUS");
}

TEST_F(FailuresGpu, LeaveNothingAfterALookAtAStreamThatIsBusy) {
  bool may_end = false;
  cuda::Context& context = arena->local<cuda::Context>();
  context.stream()->line->push([&] { return may_end; });
  EXPECT_FALSE(cuda::is_done(*arena));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  may_end = true;
  EXPECT_TRUE(cuda::is_done(*arena));
}

bool queued_work_ran = false, ran_before = false;
struct Kept {
  ~Kept() { ran_before = queued_work_ran; }
};

// A handle of a library, or pinned memory that a copy reads: queued work may use it.
TEST_F(FailuresGpu, WhatAnArenaKeepsOutlivesQueuedWork) {
  ArenaPtr own = make_arena(Device::cuda);
  own->local<Kept>();
  own->local<cuda::Context>().stream()->line->push([] { return queued_work_ran = true; });
  own.reset();
  EXPECT_TRUE(ran_before);
}

TEST_F(FailuresGpu, LeaveNothingAfterACaptureThatFailed) {
  const Tensor x = Tensor::zeros({4}, DType::float32, arena);
  const auto waits = [&] { cudaStreamSynchronize(arena->local<cuda::Context>().stream()); };
  EXPECT_THROW(cuda::Graph(arena, waits), Error);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_THROW(cuda::Graph(arena, [] { throw Error("something else"); }), Error);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(FailuresGpu, ASizePastTheCardSaysWhatIsInUse) {
  const int64_t all = arena->region().capacity();
  const Tensor held = Tensor::empty({1000}, DType::float32, arena);
  try {
    arena->allocate(all, Category::activations);
    ADD_FAILURE() << "all memory beside 4,000 bytes fit into all memory";
  } catch (const OutOfMemory& e) {
    EXPECT_EQ(std::string(e.what()),
              "out of memory: [arena] " + std::to_string(all) +
                  " bytes of activations do not fit beside the 4000 in use of " + std::to_string(all) +
                  " on the cuda; a smaller `batch`, more `microbatches`, `recompute` or `offload` need less");
  }
}

TEST_F(FailuresGpu, AGpuThatThereIsNoCodeForIsNamed) {
  setenv("TESSERA_EMULATED_GPU_IS_OLD", "1", 1);
  EXPECT_EQ(error_of([] { cuda::use_gpu(0); }),
            "`device` cuda: this program holds no code for emulated GPU, of compute capability 9.0; expected a "
            "build for it: -DTESSERA_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90");
  unsetenv("TESSERA_EMULATED_GPU_IS_OLD");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace tessera
