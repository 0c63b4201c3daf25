// Runtime functions for devices and memory: any number of GPUs with host memory.
//
// New device memory contains NaN in every dtype (new host memory contains zeros), which exposes uninitialized reads.

#include <cstdlib>
#include <optional>

#include "tensor/cuda/gpus.h"
#include "tests/cuda_emulator/memory.h"
#include "tests/cuda_emulator/reach.h"
#include "tests/cuda_emulator/streams.h"

namespace {
constexpr size_t kMemory = size_t{64} << 30;
constexpr size_t kSharedUnlessAsked = 48 * 1024;
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

// Shared memory limit of a kernel on the thread's GPU as set by cudaFuncSetAttribute; sets it if `now` is given.
size_t allowed_shared(const void* kernel, std::optional<size_t> now = {}) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, size_t> all;
  const std::lock_guard lock(mutex);
  size_t& bytes = all.try_emplace({current_device, kernel}, kSharedUnlessAsked).first->second;
  return bytes = now.value_or(bytes);
}
}  // namespace

using tessera::emulator::registered_memory;

const char* cudaGetErrorString(cudaError_t error) {
  constexpr std::pair<cudaError_t, const char*> kWords[] = {
      {cudaSuccess, "no error"},
      {cudaErrorMemoryAllocation, "out of memory"},
      {cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"},
      {cudaErrorInvalidConfiguration, "invalid configuration argument"},
      {cudaErrorNoDevice, "no CUDA-capable device is detected"},
      {cudaErrorInvalidDevice, "invalid device ordinal"},
      {cudaErrorInvalidResourceHandle, "invalid resource handle"},
      {cudaErrorNotReady, "device not ready"},
      {cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"},
      {cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"},
      {cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"},
      {cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"}};
  for (const auto& [known, words] : kWords)
    if (known == error) return words;
  return "invalid argument";
}

// TESSERA_EMULATED_GPUS is read at each call: a number (default: one), "no driver" or "old driver".
cudaError_t cudaGetDeviceCount(int* count) {
  const char* const asked = std::getenv("TESSERA_EMULATED_GPUS");
  *count = asked ? std::atoi(asked) : 1;
  if (asked && std::strstr(asked, "driver")) return tessera::emulator::remembered(cudaErrorInsufficientDriver);
  return *count > 0 ? cudaSuccess : tessera::emulator::remembered(cudaErrorNoDevice);
}
cudaError_t cudaDriverGetVersion(int* version) {
  const char* const asked = std::getenv("TESSERA_EMULATED_GPUS");
  *version = asked && std::strcmp(asked, "no driver") == 0    ? 0
             : asked && std::strcmp(asked, "old driver") == 0 ? 12040
                                                              : 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t tessera::emulator::remembered(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || device < 0 || device >= count) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}
// Compute capability 9.0, or TESSERA_EMULATED_CAPABILITY; 75 emulates a notebook's two T4 without peer access.
static int capability() {
  const char* const asked = std::getenv("TESSERA_EMULATED_CAPABILITY");
  return asked ? std::atoi(asked) : 90;
}
cudaError_t cudaDeviceCanAccessPeer(int* reaches, int, int) {
  *reaches = capability() == 75 ? 0 : 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {.name = "emulated GPU",
                 .multiProcessorCount = 4,
                 .major = capability() / 10,
                 .minor = capability() % 10,
                 .totalGlobalMem = kMemory};
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 227 * 1024 : 1;
  return cudaSuccess;
}

// Unpinned memory may be freed or modified when the call returns, so it is copied first.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  const auto copy = [=] {
    const tessera::emulator::Acting as(tessera::emulator::Side::copy);
    std::memmove(to, from, bytes);
  };
  const bool known = registered_memory().has(to, bytes) && registered_memory().has(from, bytes);
  for (const void* const end : {static_cast<const void*>(to), from})
    if (!registered_memory().has(end, bytes) && registered_memory().begins_in_one(end)) return cudaErrorInvalidValue;
  if (known) {
    tessera::emulator::queue(stream, copy);
    return cudaSuccess;
  }
  if (const cudaError_t refused = tessera::emulator::not_captured(stream); refused != cudaSuccess) return refused;
  tessera::emulator::finish(stream);
  copy();
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  if (width > to_pitch || width > from_pitch) return cudaErrorInvalidValue;
  for (size_t row = 0; row < height; ++row) {
    const cudaError_t error =
        cudaMemcpyAsync(static_cast<std::byte*>(to) + row * to_pitch,
                        static_cast<const std::byte*>(from) + row * from_pitch, width, kind, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (stream->gpu != current_device) return cudaErrorInvalidResourceHandle;
  tessera::emulator::queue(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  if (const cudaError_t refused = tessera::emulator::not_while_capturing(); refused != cudaSuccess) return refused;
  *p = std::malloc(bytes);
  if (*p) registered_memory().add(*p, bytes);
  return *p ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaFreeHost(void* p) {
  if (const cudaError_t refused = tessera::emulator::not_while_capturing(); refused != cudaSuccess) return refused;
  if (registered_memory().remove(p) == 0) return cudaErrorInvalidValue;
  tessera::emulator::resume();  // like CUDA, waits for work that may use it
  std::free(p);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  if (const cudaError_t refused = tessera::emulator::not_while_capturing(); refused != cudaSuccess) return refused;
  registered_memory().add(p, bytes);
  tessera::emulator::assign_to_both(p, bytes);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) {
  if (const cudaError_t refused = tessera::emulator::not_while_capturing(); refused != cudaSuccess) return refused;
  const size_t bytes = registered_memory().remove(p);
  if (bytes == 0) return cudaErrorInvalidValue;
  tessera::emulator::assign_to_host(p, bytes);
  return cudaSuccess;
}
// TESSERA_EMULATED_GPU_IS_OLD emulates a GPU for which the program contains no code.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return std::getenv("TESSERA_EMULATED_GPU_IS_OLD") ? tessera::emulator::remembered(cudaErrorNoKernelImageForDevice)
                                                    : cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  if (!tessera::emulator::can_run(1, static_cast<uint64_t>(value))) return cudaErrorInvalidValue;
  allowed_shared(kernel, static_cast<size_t>(value));
  return cudaSuccess;
}
static thread_local uint64_t asked = 0;
uint64_t tessera::emulator::launches() { return asked; }
cudaError_t tessera::emulator::may_run(cudaStream_t stream, const void* kernel, size_t shared_bytes) {
  ++asked;
  if (stream && stream->gpu != current_device) return cudaErrorInvalidResourceHandle;
  return shared_bytes <= allowed_shared(kernel) ? cudaSuccess : cudaErrorInvalidValue;
}

namespace tessera::cuda {
namespace {

class EmulatedRegion final : public Region {
 public:
  EmulatedRegion() : Region(Device::cuda), memory_(host_region(static_cast<int64_t>(kMemory))) {
    base_ = memory_->base();
    const char* const gib = std::getenv("TESSERA_EMULATED_GIB");
    capacity_ = gib ? int64_t{std::atoi(gib)} << 30 : memory_->capacity();
    emulator::registered_memory().add(base_, static_cast<size_t>(capacity_));
    emulator::assign_to_gpu(base_, static_cast<size_t>(capacity_));
  }
  ~EmulatedRegion() override { emulator::registered_memory().remove(base_); }
  void commit(int64_t bytes) override {
    if (bytes <= filled_) return;
    const emulator::Acting as(emulator::Side::copy);
    std::memset(base_ + filled_, 0xff, static_cast<size_t>(bytes - filled_));
    filled_ = bytes;
  }

 private:
  std::unique_ptr<Region> memory_;
  int64_t filled_ = 0;
};

}  // namespace

std::unique_ptr<Region> device_region() { return std::make_unique<EmulatedRegion>(); }

}  // namespace tessera::cuda
