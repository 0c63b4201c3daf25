// Strict rules of the emulated GPU: memory ownership, execution time of queued work, extent of copies. And properties
// that only it can check: failures that leave no last error in the runtime, passes over logits, and launch counts.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "models/decoder.h"
#include "parallel/comm/cuda/streams.h"
#include "tensor/cuda/context.h"
#include "tensor/cuda/copy.h"
#include "tensor/cuda/mma.cuh"
#include "tests/cuda_emulator/reach.h"
#include "tests/cuda_emulator/streams.h"
#include "tests/support/errors.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

extern "C" [[gnu::weak]] void __tsan_init();
extern "C" [[gnu::weak]] void __asan_init();

namespace tessera {
namespace {

// Each thread passes its index to the preceding one through shared memory.
void pass_on(float* out, bool waits) {
  float* const near = cuda::dynamic_shared<float>();
  near[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (waits) __syncthreads();
  out[threadIdx.x] = near[(threadIdx.x + 1) % blockDim.x];
}

// A kernel that writes one value.
void put(float* to, float value) { *to = value; }

// Each block increments the result of the preceding one.
void count_on(float* sums) { sums[blockIdx.x + 1] = sums[blockIdx.x] + 1; }

class EmulatedGpu : public test::OnGpu {
 protected:
  void SetUp() override {
    OnGpu::SetUp();
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // after a plain fork ThreadSanitizer loses all ordering
  }
  cudaStream_t stream() { return arena->local<cuda::Context>().stream(); }
  // Launches `blocks` blocks of `threads` threads with `shared` bytes of shared memory.
  template <class Kernel, class... Args>
  cudaError_t launch(unsigned blocks, unsigned threads, size_t shared, Kernel kernel, Args... args) {
    const cudaLaunchConfig_t config{{blocks}, {threads}, shared, stream()};
    return cudaLaunchKernelEx(&config, kernel, args...);
  }
  void launch_put(float* to, float value) { ASSERT_EQ(launch(1, 1, 0, put, to, value), cudaSuccess); }
  void finish() { ASSERT_EQ(cudaStreamSynchronize(stream()), cudaSuccess); }
};
class EmulatedGpuDeathTest : public EmulatedGpu {
 protected:
  void SetUp() override {
    EmulatedGpu::SetUp();
    if (!emulator::is_guarded()) GTEST_SKIP() << "this CPU has no protection keys";
  }
};

TEST_F(EmulatedGpu, ExposesDependenciesBetweenBlocks) {
  std::vector<float> last;
  for (int i = 0; i < 3; ++i) {
    const Tensor sums = Tensor::zeros({8}, DType::float32, arena);
    ASSERT_EQ(launch(7, 1, 0, count_on, sums.device_data<float>()), cudaSuccess);
    last.push_back(sums.to_vector<float>()[7]);
  }
  std::ranges::sort(last);
  EXPECT_EQ(last, (std::vector<float>{1, 2, 7}));
  for (const uint64_t count : {1, 2, 7, 8})
    for (int i = 0; i < 3; ++i) {
      std::vector<uint64_t> order, all(count);
      emulator::in_any_order(count, [&](uint64_t n) { order.push_back(n); });
      std::ranges::sort(order);
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(order, all);
    }
}

TEST_F(EmulatedGpu, ThreadSanitizerDetectsMissingBarrier) {
  if (&__tsan_init == nullptr) GTEST_SKIP() << "a build without ThreadSanitizer";
  const Tensor x = Tensor::zeros({128}, DType::float32, arena);
  const auto run = [&](bool waits, unsigned threads = 64) {
    ASSERT_EQ(launch(1, threads, 4 * threads, pass_on, x.device_data<float>(), waits), cudaSuccess);
    finish();
  };
  run(true);
  EXPECT_EQ(x.to_vector<float>()[62], 63.0f);
  run(true, 128);  // half of these threads have passed one more barrier than the others
  EXPECT_EXIT((run(false), std::exit(66)), testing::ExitedWithCode(66), "data race");
}

// Kernels may access a released block until the work queued before its release is done.
TEST_F(EmulatedGpu, AddressSanitizerDetectsUseAfterRelease) {
  if (&__asan_init == nullptr) GTEST_SKIP() << "a build without AddressSanitizer";
  const auto run = [&](bool in_time) {
    Tensor x = Tensor::zeros({4}, DType::float32, arena);
    float* const at = x.device_data<float>();
    if (in_time) launch_put(at, 1);
    x = Tensor();
    if (!in_time) launch_put(at, 1);
    finish();
  };
  run(true);
  EXPECT_DEATH(run(false), "use-after-poison");
}

// AddressSanitizer reports a fault in its own format.
TEST_F(EmulatedGpuDeathTest, HostAccessToDeviceMemoryFaults) {
  const Tensor x = Tensor::zeros({4}, DType::float32, arena);
  EXPECT_DEATH(put(x.device_data<float>(), 1), "the host touches the GPU's memory|AddressSanitizer: SEGV");
}

TEST_F(EmulatedGpuDeathTest, KernelAccessToHostMemoryFaults) {
  const Tensor x = Tensor::zeros({4}, DType::float32, make_arena());
  const auto run = [&] {
    launch_put(x.data<float>(), 1);
    cudaStreamSynchronize(stream());
  };
  EXPECT_DEATH(run(), "a kernel touches the host's memory, which is not pinned|AddressSanitizer: SEGV");
}

TEST_F(EmulatedGpu, HostAndKernelAccessPinnedMemory) {
  Arena pinned(cuda::pinned_region());
  auto* const x = reinterpret_cast<float*>(pinned.allocate(64, Category::workspace));
  *x = 1;
  launch_put(x, 2);
  finish();
  EXPECT_EQ(*x, 2.0f);
  pinned.release(reinterpret_cast<std::byte*>(x), 64, Category::workspace);
}

TEST_F(EmulatedGpu, NewMemoryContainsNaN) {
  const Tensor x = Tensor::empty({1000}, DType::float32, arena);
  for (const float value : x.to_vector<float>()) EXPECT_TRUE(std::isnan(value));
}

// Queued work runs at the next wait, or immediately.
TEST_F(EmulatedGpu, RunsQueuedWorkAtNextWaitOrImmediately) {
  const std::shared_ptr<std::byte> pinned = cuda::pinned_memory(sizeof(float));
  auto* const x = reinterpret_cast<float*>(pinned.get());
  *x = 1;
  launch_put(x, 2);
  EXPECT_EQ(*x, emulator::is_deferred() ? 1.0f : 2.0f);
  finish();
  EXPECT_EQ(*x, 2.0f);
}

// Pinned memory is registered in chunks: CUDA rejects a copy that spans two of them.
TEST_F(EmulatedGpu, RejectsCopiesAcrossPinnedAllocations) {
  constexpr int64_t kChunk = int64_t{16} << 20;
  const std::unique_ptr<Region> pinned = cuda::pinned_region();
  pinned->commit(2 * kChunk);
  const Tensor x = Tensor::empty({64}, DType::float32, arena);
  const auto copied_from = [&](int64_t at) {
    return cudaMemcpyAsync(x.device_data<float>(), pinned->base() + at, 256, cudaMemcpyDefault, stream());
  };
  EXPECT_EQ(copied_from(kChunk), cudaSuccess);
  EXPECT_EQ(copied_from(kChunk - 256), cudaSuccess);
  EXPECT_EQ(copied_from(kChunk - 128), cudaErrorInvalidValue);
  finish();
}

TEST_F(EmulatedGpu, KernelRunsOnTheGpuOfItsThread) {
  setenv("TESSERA_EMULATED_GPUS", "2", 1);
  const std::shared_ptr<void> one_again(nullptr, [](void*) {
    cudaSetDevice(0);
    unsetenv("TESSERA_EMULATED_GPUS");
  });
  const Tensor x = Tensor::zeros({4}, DType::float32, arena);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(launch(1, 1, 0, put, x.device_data<float>(), 1.0f), cudaErrorInvalidResourceHandle);
  const cuda::Event event = cuda::make_event();
  EXPECT_EQ(cudaEventRecord(event.get(), stream()), cudaErrorInvalidResourceHandle);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  launch_put(x.device_data<float>(), 1);
  finish();
}

TEST_F(EmulatedGpu, RejectsLargeSharedMemoryUnlessRequested) {
  const Tensor x = Tensor::zeros({4}, DType::float32, arena);
  const auto launched = [&] { return launch(1, 1, 64 * 1024, put, x.device_data<float>(), 1.0f); };
  EXPECT_EQ(launched(), cudaErrorInvalidValue);
  const auto* const kernel = reinterpret_cast<const void*>(put);
  ASSERT_EQ(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 * 1024), cudaSuccess);
  EXPECT_EQ(launched(), cudaSuccess);
  finish();
}

// A call that may wait for the GPU invalidates a capture.
TEST_F(EmulatedGpu, RejectsPinningDuringCapture) {
  ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_THROW(cuda::pinned_memory(16), Error);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream(), &graph), cudaErrorStreamCaptureInvalidated);
}

// Expected failures leave no last error in the runtime, where NVIDIA's libraries would find it after their launches and
// report it as their own.

using FailuresGpu = test::OnGpu;

TEST_F(FailuresGpu, QueryWithoutGpuLeavesNoError) {
  setenv("TESSERA_EMULATED_GPUS", "0", 1);
  EXPECT_EQ(cuda::gpu_count(), 0);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_THROW(cuda::use_gpu(0), Error);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  int count = 0;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorNoDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNoDevice) << "the emulated runtime records no error";
  unsetenv("TESSERA_EMULATED_GPUS");
}

TEST_F(FailuresGpu, MissingGpuIsExplainedInOneLine) {
  const std::pair<const char*, std::string> cases[] = {
      {"no driver", "this machine has no NVIDIA driver, or the container has no access to it"},
      {"old driver", "the NVIDIA driver is for CUDA 12.4, older than this program's CUDA 13.0"},
      {"0", "the NVIDIA driver lists none"}};
  for (const auto& [gpus, why] : cases) {
    setenv("TESSERA_EMULATED_GPUS", gpus, 1);
    EXPECT_EQ(error_message([] { cuda::use_gpu(0); }),
              "`device` cuda: no GPU was found: " + why + "; `device` cpu needs none");
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
  unsetenv("TESSERA_EMULATED_GPUS");
}

TEST_F(FailuresGpu, QueryOfBusyStreamLeavesNoError) {
  bool may_end = false;
  cuda::Context& context = arena->local<cuda::Context>();
  context.stream()->line->push([&] { return may_end; });
  EXPECT_FALSE(cuda::is_done(*arena));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  may_end = true;
  EXPECT_TRUE(cuda::is_done(*arena));
}

bool queued_work_ran = false, ran_before = false;
struct RunsQueuedWork {
  ~RunsQueuedWork() { ran_before = queued_work_ran; }
};

// Arena locals, such as library handles or pinned memory, may be used by queued work.
TEST_F(FailuresGpu, ArenaLocalsOutliveQueuedWork) {
  ArenaPtr own = make_arena(Device::cuda);
  own->local<RunsQueuedWork>();
  own->local<cuda::Context>().stream()->line->push([] { return queued_work_ran = true; });
  own.reset();
  EXPECT_TRUE(ran_before);
}

TEST_F(FailuresGpu, FailedCaptureLeavesNoError) {
  const Tensor x = Tensor::zeros({4}, DType::float32, arena);
  const auto waits = [&] { cudaStreamSynchronize(arena->local<cuda::Context>().stream()); };
  EXPECT_THROW(cuda::Graph(arena, waits), Error);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_THROW(cuda::Graph(arena, [] { throw Error("something else"); }), Error);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(FailuresGpu, OutOfMemoryErrorNamesBytesInUse) {
  const int64_t all = arena->region().capacity();
  const Tensor held = Tensor::empty({1000}, DType::float32, arena);
  EXPECT_EQ(error_message([&] { arena->allocate(all, Category::activations); }, Status::communication),
            fmt::format("out of memory: [arena] {0} bytes of activations do not fit in addition to the 4000 in use of "
                        "{0} on the cuda; reduce `batch`, increase `microbatches`, or use `recompute` or `offload`",
                        all));
}

TEST_F(FailuresGpu, ErrorNamesGpuWithoutKernelCode) {
  setenv("TESSERA_EMULATED_GPU_IS_OLD", "1", 1);
  EXPECT_EQ(error_message([] { cuda::use_gpu(0); }),
            "`device` cuda: this program was not built for emulated GPU (compute capability 9.0); rebuild with "
            "-DTESSERA_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90");
  unsetenv("TESSERA_EMULATED_GPU_IS_OLD");
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// A training step computes its loss and gradient in one pass over the logits. Detected by the shared memory of the
// launched kernels, because two passes compute the same values.

constexpr int64_t kVocab = 4104, kBatch = 2, kTokens = 8;

class FusedCrossEntropy : public test::OnGpu {
 protected:
  void SetUp() override {
    OnGpu::SetUp();
    ids = Tensor::zeros({kBatch, kTokens}, DType::int32, arena);
  }
  // Number of rows read into shared memory while f ran and the GPU finished.
  int64_t rows_in_shared(DType dtype, const std::function<void()>& f) {
    const auto bytes = static_cast<uint64_t>(kVocab * element_size(dtype));
    const uint64_t before = emulator::blocks_with_shared(bytes);
    f();
    ids.on_host();  // waits
    return static_cast<int64_t>(emulator::blocks_with_shared(bytes) - before);
  }
  Tensor ids;
};

TEST_F(FusedCrossEntropy, TrainingStepReadsLogitsOnce) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    Decoder model({.layers = 1, .heads = 1, .channels = 16, .context = kTokens, .vocab = kVocab});
    model.materialize(1, arena, dtype, DType::float32);
    EXPECT_EQ(rows_in_shared(dtype, [&] { backward(model.loss(ids, ids, 0.1).mean); }), kBatch * kTokens);
    const auto validate = [&] {
      const NoGrad no_grad;
      model.loss(ids, ids, 0.1);
    };
    EXPECT_EQ(rows_in_shared(dtype, validate), 0);
  }
}

// Logits that are used again afterwards are not overwritten.
TEST_F(FusedCrossEntropy, ReusedLogitsAreNotOverwritten) {
  const Var logits(Tensor::zeros({kBatch * kTokens, kVocab}, DType::float32, arena), true);
  const Tensor targets = ids.reshape({kBatch * kTokens});
  EXPECT_EQ(rows_in_shared(DType::float32, [&] { backward(cross_entropy(logits, targets, 1).mean); }), 0);
  EXPECT_EQ(logits.value().to_vector<float>(), std::vector<float>(kBatch * kTokens * kVocab, 0.0f));
  const Var twice = scale(logits, 2);
  EXPECT_EQ(rows_in_shared(DType::float32, [&] { backward(cross_entropy(twice, targets, 1).mean); }), 0);
  EXPECT_EQ(rows_in_shared(DType::float32, [&] { backward(cross_entropy(scale(logits, 2), targets, 1).mean); }),
            kBatch * kTokens);
}

// Kernel launches of an expert layer are independent of the number of experts.

using KernelLaunches = test::OnGpu;

constexpr int64_t kChannels = 8, kHidden = 12;

// Launches of a forward pass, and of its backward pass.
std::pair<uint64_t, uint64_t> of_a_pass(MixtureOfExperts& layer, const Var& x) {
  const uint64_t before = emulator::launches();
  const Var y = layer(x);
  const uint64_t between = emulator::launches();
  backward(y, {.seed = x.value()});
  return {between - before, emulator::launches() - between};
}

TEST_F(KernelLaunches, CountIsIndependentOfNumberOfExperts) {
  for (const bool gated : {false, true})
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      using Passes = std::vector<std::pair<uint64_t, uint64_t>>;
      Passes first, second;  // gradients are written, or accumulated
      for (const int64_t experts : {4, 64, 192}) {
        const ActivationOptions activation = gated ? kSwiglu : ActivationOptions{};
        MixtureOfExperts layer(kChannels,
                               {.hidden = kHidden, .mlp = {.activation = activation}, .experts = {.count = experts}});
        layer.materialize(3, arena, dtype, DType::float32);
        layer.set_step({.training = true});
        layer.clear_gradients();
        const Var x(test::random_tensor({2, 20, kChannels}, dtype, "x").to(arena), true);
        of_a_pass(layer, x);  // may time matmuls of new shapes
        layer.clear_gradients();
        first.push_back(of_a_pass(layer, x));
        second.push_back(of_a_pass(layer, x));
      }
      EXPECT_EQ(first, Passes(3, first[0]));
      EXPECT_EQ(second, Passes(3, second[0]));
    }
}

// One launch per full set of group arguments, if there are rows or, for gradients, weights.
TEST_F(KernelLaunches, GroupedGemmLaunchesOncePer192Groups) {
  const Tensor x = test::random_tensor({40, kChannels}, DType::float32, "x").to(arena),
               dy = test::random_tensor({40, kHidden}, DType::float32, "dy").to(arena),
               w = test::random_tensor({kHidden, kChannels}, DType::float32, "w").to(arena);
  for (const auto& [count, expected] : {std::pair<size_t, uint64_t>{1, 1}, {192, 1}, {193, 2}, {500, 3}}) {
    SCOPED_TRACE(count);
    std::vector<GemmGroup> groups(count, {.w = w}), gradients(count);
    for (GemmGroup& g : gradients) g.w = w.make(w.shape());
    for (std::vector<GemmGroup>* const all : {&groups, &gradients}) {
      all->front().rows += 17;
      all->at(count / 2).rows += 20;
      all->back().rows += 3;
    }
    uint64_t before = emulator::launches();
    const auto launches = [&] {
      const uint64_t now = emulator::launches();
      return now - std::exchange(before, now);
    };
    grouped_linear(x, groups);
    EXPECT_EQ(launches(), expected);
    grouped_linear_input_grad(dy, groups);
    EXPECT_EQ(launches(), expected);
    grouped_linear_weight_grads(gradients, dy, x);
    EXPECT_EQ(launches(), expected);
  }
}

// Without an algorithm for odd rows, only operands with odd rows are copied: the weight (fill and copy) and the result
// (copy), but not x.
TEST_F(KernelLaunches, PaddedMatmulCopiesOnlyUnalignedOperands) {
  const auto of_rows = [&](int64_t rows) {
    const Tensor x = test::random_tensor({rows, 16}, DType::bfloat16, "x").to(arena),
                 w = test::random_tensor({21, 16}, DType::bfloat16, "w").to(arena);
    const uint64_t before = emulator::launches();
    linear(x, w, Tensor());
    return emulator::launches() - before;
  };
  setenv("TESSERA_EMULATED_ALIGNMENT", "16", 1);
  const uint64_t even = of_rows(8), odd = of_rows(9);
  unsetenv("TESSERA_EMULATED_ALIGNMENT");
  EXPECT_EQ(even, 4U);
  EXPECT_EQ(odd, 6U);
}

}  // namespace
}  // namespace tessera
