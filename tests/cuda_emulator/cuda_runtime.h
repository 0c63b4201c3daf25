// The subset of the CUDA runtime that Tessera uses, on the CPU, so that kernels and their callers are tested, also
// under sanitizers, on machines without a GPU.
//
// A build with -DTESSERA_CUDA=EMULATED compiles the .cu files as C++ with this header instead of CUDA's. A block's
// threads are fibers of one thread; blocks run one after another, in a different order at each launch; and work queued
// on a stream runs as late as possible, or immediately (tests/cuda_emulator/streams.h). During stream capture, queued
// work is recorded with a copy of its arguments and run by each launch of the graph. TESSERA_EMULATED_GPUS sets the
// number of GPUs (default: one); all use host memory, where protection keys separate host and device if the CPU has
// them (tests/cuda_emulator/reach.h). Differences from a GPU: blocks never run concurrently, and only the functions
// declared here exist. The macros below are CUDA's own names.
#pragma once
#include <cmath>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tests/cuda_emulator/emulator.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct uint3 {
  unsigned x = 0, y = 0, z = 0;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

// Indices of the running thread, and sizes of its block and grid.
inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

inline void __syncthreads() { tessera::emulator::sync_block(); }
inline void __syncwarp(unsigned mask = ~0u) { tessera::emulator::sync_warp(mask); }
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int = 32) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  return tessera::emulator::exchange(mask, value, lane);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int = 32) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ bits);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int = 32) {
  const int lane = static_cast<int>(threadIdx.x % 32), from = lane + static_cast<int>(by);
  return __shfl_sync(mask, value, from < 32 ? from : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) { return tessera::emulator::ballot(mask, predicate != 0); }
template <class T>
T atomicMin(T* to, T value) {  // fibers of one block never run concurrently, ranks do
  T before = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (value < before && !__atomic_compare_exchange_n(to, &before, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorStreamCaptureUnjoined = 904,
  cudaErrorCapturedEvent = 907
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDefault = 4 };
enum cudaDeviceAttr { cudaDevAttrCanUseHostPointerForRegisteredMem = 91, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
struct cudaFuncAttributes {
  int maxThreadsPerBlock = 1024;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
inline constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostAllocDefault = 0,
                          cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2;
using cudaStream_t = struct EmulatedStream*;
using cudaEvent_t = struct EmulatedEvent*;
using cudaGraph_t = struct EmulatedGraph*;
using cudaGraphExec_t = struct EmulatedExecutable*;
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
struct cudaDeviceProp {
  char name[256];
  int multiProcessorCount, major, minor;
  size_t totalGlobalMem;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceCanAccessPeer(int* reaches, int device, int peer);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* p);
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* p);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
cudaError_t cudaGetLastError();

namespace tessera::emulator {

// Returns `error` and records it for cudaGetLastError().
cudaError_t remembered(cudaError_t error);
// Runs `work`, or records it if the stream is being captured.
void queue(cudaStream_t stream, const std::function<void()>& work);
// Whether the stream belongs to the calling thread's GPU and the kernel's shared memory is permitted.
cudaError_t may_run(cudaStream_t stream, const void* kernel, size_t shared_bytes);

inline void run_grid(const cudaLaunchConfig_t& config, const std::function<void()>& body) {
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  gridDim = grid;
  blockDim = block;
  // ThreadSanitizer would report a race, although each fiber reads only its own values.
  const auto enter = [&](unsigned thread) __attribute__((no_sanitize("thread"))) {
    threadIdx = {thread % block.x, thread / block.x % block.y, thread / block.x / block.y};
  };
  const uint64_t row = grid.x, plane = row * grid.y;
  in_any_order(plane * grid.z, [&](uint64_t n) {
    blockIdx = {static_cast<unsigned>(n % row), static_cast<unsigned>(n % plane / row),
                static_cast<unsigned>(n / plane)};
    run_block(block.x * block.y * block.z, config.dynamicSmemBytes, enter, body);
  });
}

}  // namespace tessera::emulator

template <class... Parameters, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Args&&... args) {
  const std::tuple<Parameters...> values(std::forward<Args>(args)...);
  const dim3 &grid = config->gridDim, &block = config->blockDim;
  if (!tessera::emulator::can_run(uint64_t{block.x} * block.y * block.z, config->dynamicSmemBytes) || grid.x == 0)
    return cudaErrorInvalidConfiguration;
  if (const cudaError_t refused =
          tessera::emulator::may_run(config->stream, reinterpret_cast<const void*>(kernel), config->dynamicSmemBytes);
      refused != cudaSuccess)
    return refused;
  tessera::emulator::queue(config->stream, [launched = *config, kernel, values] {
    tessera::emulator::run_grid(launched, [&] { std::apply(kernel, values); });
  });
  return cudaSuccess;
}
