// Rules of the emulated GPU that it keeps strictly: whose memory it is, when work runs, what a copy may span.

#include <cstdlib>

#include "tensor/cuda/context.h"
#include "tensor/cuda/copy.h"
#include "tensor/cuda/mma.cuh"
#include "tests/cuda_emulator/reach.h"
#include "tests/cuda_emulator/streams.h"
#include "tests/support/gpu.h"

extern "C" [[gnu::weak]] void __tsan_init();
extern "C" [[gnu::weak]] void __asan_init();

namespace tessera {
namespace {

// Each thread hands its number to the one before it, in shared memory.
void hand_on(float* out, bool waits) {
  float* const near = cuda::dynamic_shared<float>();
  near[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (waits) __syncthreads();
  out[threadIdx.x] = near[(threadIdx.x + 1) % blockDim.x];
}

// A kernel that writes one number.
void put(float* to, float value) { *to = value; }

// Each block adds to what the one before it has left.
void count_on(float* sums) { sums[blockIdx.x + 1] = sums[blockIdx.x] + 1; }

class EmulatedGpu : public test::OnGpu {
 protected:
  void SetUp() override {
    OnGpu::SetUp();
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // ThreadSanitizer sees no order any more behind a fork alone
  }
  cudaStream_t stream() { return arena->local<cuda::Context>().stream(); }
  void launch_put(float* to, float value) {
    const cudaLaunchConfig_t one{.gridDim = {}, .blockDim = {}, .dynamicSmemBytes = 0, .stream = stream()};
    ASSERT_EQ(cudaLaunchKernelEx(&one, put, to, value), cudaSuccess);
  }
};
class EmulatedGpuDeathTest : public EmulatedGpu {
 protected:
  void SetUp() override {
    EmulatedGpu::SetUp();
    if (!emulator::is_guarded()) GTEST_SKIP() << "this processor has no protection keys";
  }
};

TEST_F(EmulatedGpu, BlocksThatNeedEachOtherGiveOtherNumbers) {
  std::vector<float> last;
  for (int i = 0; i < 3; ++i) {
    const Tensor sums = Tensor::zeros({8}, DType::float32, arena);
    const cudaLaunchConfig_t blocks{.gridDim = {7}, .blockDim = {}, .dynamicSmemBytes = 0, .stream = stream()};
    ASSERT_EQ(cudaLaunchKernelEx(&blocks, count_on, sums.device_data<float>()), cudaSuccess);
    last.push_back(sums.to_vector<float>()[7]);
  }
  std::sort(last.begin(), last.end());
  EXPECT_EQ(last, (std::vector<float>{1, 2, 7}));
  for (const uint64_t count : {1, 2, 7, 8})
    for (int i = 0; i < 3; ++i) {
      std::vector<uint64_t> met;
      emulator::in_any_order(count, [&](uint64_t n) { met.push_back(n); });
      std::sort(met.begin(), met.end());
      ASSERT_EQ(met.size(), count);
      for (uint64_t n = 0; n < count; ++n) EXPECT_EQ(met[n], n);
    }
}

TEST_F(EmulatedGpu, ThreadSanitizerSeesABarrierThatIsMissing) {
  if (&__tsan_init == nullptr) GTEST_SKIP() << "a build without ThreadSanitizer";
  const Tensor x = Tensor::zeros({128}, DType::float32, arena);
  const auto run = [&](bool waits, unsigned threads = 64) {
    const cudaLaunchConfig_t config{
        .gridDim = {}, .blockDim = {threads}, .dynamicSmemBytes = 4 * threads, .stream = stream()};
    ASSERT_EQ(cudaLaunchKernelEx(&config, hand_on, x.device_data<float>(), waits), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream()), cudaSuccess);
  };
  run(true);
  EXPECT_EQ(x.to_vector<float>()[62], 63.0f);
  run(true, 128);  // half of these threads have met at one barrier more than the others
  EXPECT_EXIT((run(false), std::exit(66)), testing::ExitedWithCode(66), "data race");
}

// A block that the host has given back is a kernel's until what was queued before is done.
TEST_F(EmulatedGpu, AddressSanitizerKnowsWhenABlockIsGivenBack) {
  if (&__asan_init == nullptr) GTEST_SKIP() << "a build without AddressSanitizer";
  const auto run = [&](bool in_time) {
    Tensor x = Tensor::zeros({4}, DType::float32, arena);
    float* const at = x.device_data<float>();
    if (in_time) launch_put(at, 1);
    x = Tensor();
    if (!in_time) launch_put(at, 1);
    ASSERT_EQ(cudaStreamSynchronize(stream()), cudaSuccess);
  };
  run(true);
  EXPECT_DEATH(run(false), "use-after-poison");
}

// AddressSanitizer tells of a fault in its own way.
TEST_F(EmulatedGpuDeathTest, TheHostMayNotTouchItsMemory) {
  const Tensor x = Tensor::zeros({4}, DType::float32, arena);
  EXPECT_DEATH(put(x.device_data<float>(), 1), "the host touches the GPU's memory|AddressSanitizer: SEGV");
}

TEST_F(EmulatedGpuDeathTest, AKernelMayNotTouchTheHosts) {
  const Tensor x = Tensor::zeros({4}, DType::float32, make_arena());
  const auto run = [&] {
    launch_put(x.data<float>(), 1);
    cudaStreamSynchronize(stream());
  };
  EXPECT_DEATH(run(), "a kernel touches the host's memory, which is not pinned|AddressSanitizer: SEGV");
}

TEST_F(EmulatedGpu, BothTouchPinnedMemory) {
  Arena pinned(cuda::pinned_region());
  auto* const x = reinterpret_cast<float*>(pinned.allocate(64, Category::workspace));
  *x = 1;
  launch_put(x, 2);
  ASSERT_EQ(cudaStreamSynchronize(stream()), cudaSuccess);
  EXPECT_EQ(*x, 2.0f);
  pinned.release(reinterpret_cast<std::byte*>(x), 64, Category::workspace);
}

TEST_F(EmulatedGpu, NewMemoryHoldsNaN) {
  const Tensor x = Tensor::empty({1000}, DType::float32, arena);
  for (const float value : x.to_vector<float>()) EXPECT_TRUE(std::isnan(value));
}

// Queued work is not done before somebody waits, or is done at once.
TEST_F(EmulatedGpu, RunsLateOrAtOnce) {
  const std::shared_ptr<std::byte> pinned = cuda::pinned_memory(sizeof(float));
  auto* const x = reinterpret_cast<float*>(pinned.get());
  *x = 1;
  launch_put(x, 2);
  EXPECT_EQ(*x, emulator::is_late() ? 1.0f : 2.0f);
  ASSERT_EQ(cudaStreamSynchronize(stream()), cudaSuccess);
  EXPECT_EQ(*x, 2.0f);
}

// Registered piece by piece: CUDA refuses a copy from one into the next.
TEST_F(EmulatedGpu, ACopyLiesInOnePieceOfPinnedMemory) {
  constexpr int64_t kPiece = int64_t{16} << 20;
  const std::unique_ptr<Region> pinned = cuda::pinned_region();
  pinned->commit(2 * kPiece);
  const Tensor x = Tensor::empty({64}, DType::float32, arena);
  const auto copied_from = [&](int64_t at) {
    return cudaMemcpyAsync(x.device_data<float>(), pinned->base() + at, 256, cudaMemcpyDefault, stream());
  };
  EXPECT_EQ(copied_from(kPiece), cudaSuccess);
  EXPECT_EQ(copied_from(kPiece - 256), cudaSuccess);
  EXPECT_EQ(copied_from(kPiece - 128), cudaErrorInvalidValue);
  ASSERT_EQ(cudaStreamSynchronize(stream()), cudaSuccess);
}

TEST_F(EmulatedGpu, AKernelRunsOnTheGpuOfItsThread) {
  setenv("TESSERA_EMULATED_GPUS", "2", 1);
  const std::shared_ptr<void> one_again(nullptr, [](void*) {
    cudaSetDevice(0);
    unsetenv("TESSERA_EMULATED_GPUS");
  });
  const cudaLaunchConfig_t one{.gridDim = {}, .blockDim = {}, .dynamicSmemBytes = 0, .stream = stream()};
  const Tensor zeros = Tensor::zeros({4}, DType::float32, arena);
  float* const x = zeros.device_data<float>();
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(cudaLaunchKernelEx(&one, put, x, 1.0f), cudaErrorInvalidResourceHandle);
  const cuda::Event event = cuda::make_event();
  EXPECT_EQ(cudaEventRecord(event.get(), stream()), cudaErrorInvalidResourceHandle);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(cudaLaunchKernelEx(&one, put, x, 1.0f), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream()), cudaSuccess);
}

TEST_F(EmulatedGpu, MuchSharedMemoryIsAskedFor) {
  const cudaLaunchConfig_t much{.gridDim = {}, .blockDim = {}, .dynamicSmemBytes = 64 * 1024, .stream = stream()};
  const Tensor x = Tensor::zeros({4}, DType::float32, arena);
  const auto launched = [&] { return cudaLaunchKernelEx(&much, put, x.device_data<float>(), 1.0f); };
  EXPECT_EQ(launched(), cudaErrorInvalidValue);
  const auto* const kernel = reinterpret_cast<const void*>(put);
  ASSERT_EQ(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 * 1024), cudaSuccess);
  EXPECT_EQ(launched(), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream()), cudaSuccess);
}

// A call that may wait for the GPU breaks a capture off.
TEST_F(EmulatedGpu, NothingIsPinnedWhileWorkIsCaptured) {
  ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_THROW(cuda::pinned_memory(16), Error);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream(), &graph), cudaErrorStreamCaptureInvalidated);
}

}  // namespace
}  // namespace tessera
