// Failures that are expected leave nothing behind in the runtime's last error, where NVIDIA's libraries look after
// their launches and would take it for their own.
#include <gtest/gtest.h>

#include <cstdlib>

#include "parallel/comm/cuda/streams.h"
#include "tensor/cuda/context.h"
#include "tensor/cuda/gpus.h"
#include "tensor/cuda/graph.h"
#include "tensor/cuda/region.h"
#include "tests/cuda_emulator/streams.h"
#include "tests/support/gpu.h"

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

TEST_F(FailuresGpu, LeaveNothingAfterALookAtAStreamThatIsBusy) {
  bool may_end = false;
  cuda::Context& context = arena->local<cuda::Context>();
  context.stream()->line->push([&] { return may_end; });
  EXPECT_FALSE(cuda::is_done(*arena));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  may_end = true;
  EXPECT_TRUE(cuda::is_done(*arena));
}

TEST_F(FailuresGpu, LeaveNothingAfterACaptureThatFailed) {
  const Tensor x = Tensor::zeros({4}, DType::float32, arena);
  const auto waits = [&] { cudaStreamSynchronize(arena->local<cuda::Context>().stream()); };
  EXPECT_THROW(cuda::Graph(arena, waits), Error);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_THROW(cuda::Graph(arena, [] { throw Error("something else"); }), Error);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(FailuresGpu, LeaveNothingAfterAnAllocationThatFailed) {
  setenv("TESSERA_GPU_ARENA", "plain:4096", 1);
  EXPECT_THROW(make_arena(Device::cuda), OutOfMemory);
  unsetenv("TESSERA_GPU_ARENA");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// Memory that is taken at once: it serves as the other does, to its end.
TEST_F(FailuresGpu, PlainMemoryServes) {
  setenv("TESSERA_GPU_ARENA", "plain:1", 1);
  const ArenaPtr plain = make_arena(Device::cuda);
  EXPECT_EQ(plain->region().capacity(), int64_t{1} << 30);
  EXPECT_EQ(plain->region().note(), "memory of the GPU is taken at once, 1024 MiB (TESSERA_GPU_ARENA is plain:1)");
  Tensor x = Tensor::empty({1000}, DType::float32, plain);
  x.fill(3);
  EXPECT_EQ(x.on_host().to_vector<float>(), std::vector<float>(1000, 3.0f));
  try {
    plain->allocate(int64_t{1} << 30, Category::activations);
    ADD_FAILURE() << "1 GiB beside 4,000 bytes fit into 1 GiB";
  } catch (const OutOfMemory& e) {
    EXPECT_STREQ(e.what(),
                 "out of memory: [arena] 1073741824 bytes of activations do not fit beside the 4000 in use of "
                 "1073741824 on the cuda; a smaller `batch`, more `microbatches`, `recompute` or `offload` need less");
  }
  for (const char* wrong : {"plainly", "plain:", "plain:0", "plain:4x", "plain:-1"}) {
    setenv("TESSERA_GPU_ARENA", wrong, 1);
    EXPECT_THROW(make_arena(Device::cuda), Error) << wrong;
  }
  unsetenv("TESSERA_GPU_ARENA");
}

TEST_F(FailuresGpu, AGpuThatThereIsNoCodeForIsNamed) {
  setenv("TESSERA_EMULATED_GPU_IS_OLD", "1", 1);
  try {
    cuda::use_gpu(0);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "`device` cuda: this program holds no code for emulated GPU, of compute capability 9.0; expected a "
                 "build for it: -DTESSERA_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90");
  }
  unsetenv("TESSERA_EMULATED_GPU_IS_OLD");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace tessera
