// The runtime's functions: one GPU, whose memory is the host's, whose streams are done when they are called, and whose
// graphs are lists of what was queued.
#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "tensor/cuda/region.h"
#include "tests/cuda_emulator/cuda_runtime.h"

struct EmulatedGraph {
  std::vector<std::function<void()>> work;
};
struct EmulatedExecutable {
  std::vector<std::function<void()>> work;
};
struct EmulatedStream {
  std::unique_ptr<EmulatedGraph> captured;  // while it is
  bool broken = false;                      // by a call that cannot be captured
};
struct EmulatedEvent {};

namespace {
constexpr size_t kMemory = size_t{64} << 30;

// Memory that is there as long as the process, or until it is given back: GPUs' and pinned. A graph may copy no other.
class KnownMemory {
 public:
  void add(const void* p, size_t bytes) {
    const std::lock_guard lock(mutex_);
    ends_[static_cast<const std::byte*>(p)] = static_cast<const std::byte*>(p) + bytes;
  }
  void remove(const void* p) {
    const std::lock_guard lock(mutex_);
    ends_.erase(static_cast<const std::byte*>(p));
  }
  bool has(const void* p, size_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto* const first = static_cast<const std::byte*>(p);
    const auto after = ends_.upper_bound(first);
    return after != ends_.begin() && first + bytes <= std::prev(after)->second;
  }

 private:
  std::mutex mutex_;
  std::map<const std::byte*, const std::byte*> ends_;  // by the beginning
};
KnownMemory& known_memory() {
  static KnownMemory all;
  return all;
}

// What a capture does not take breaks it off.
cudaError_t not_captured(cudaStream_t stream) {
  if (!stream->captured) return cudaSuccess;
  stream->broken = true;
  return cudaErrorStreamCaptureUnsupported;
}
}  // namespace

void tessera::emulator::queue(cudaStream_t stream, const std::function<void()>& work) {
  if (stream && stream->captured)
    stream->captured->work.push_back(work);
  else
    work();
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    default:
      return "invalid argument";
  }
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {.name = "emulated GPU", .multiProcessorCount = 4, .major = 9, .minor = 0, .totalGlobalMem = kMemory};
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 4;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new EmulatedStream;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return not_captured(stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned) { return not_captured(stream); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new EmulatedEvent;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t stream) { return not_captured(stream); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (!known_memory().has(to, bytes) || !known_memory().has(from, bytes))
    if (const cudaError_t refused = not_captured(stream); refused != cudaSuccess) return refused;
  tessera::emulator::queue(stream, [=] { std::memmove(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  tessera::emulator::queue(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  *p = std::malloc(bytes);
  if (*p) known_memory().add(*p, bytes);
  return *p ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaFreeHost(void* p) {
  known_memory().remove(p);
  std::free(p);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (const cudaError_t twice = not_captured(stream); twice != cudaSuccess) return twice;
  stream->captured = std::make_unique<EmulatedGraph>();
  stream->broken = false;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  if (!stream->captured) return cudaErrorInvalidValue;
  const std::unique_ptr<EmulatedGraph> captured = std::move(stream->captured);
  if (stream->broken) return cudaErrorStreamCaptureInvalidated;
  *graph = new EmulatedGraph(*captured);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = new EmulatedExecutable{graph->work};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  if (const cudaError_t inside = not_captured(stream); inside != cudaSuccess) return inside;
  for (const std::function<void()>& work : executable->work) work();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}

namespace tessera::cuda {
namespace {

class EmulatedRegion final : public Region {
 public:
  EmulatedRegion() : Region(Device::cuda), memory_(host_region(static_cast<int64_t>(kMemory))) {
    base_ = memory_->base();
    capacity_ = memory_->capacity();
    known_memory().add(base_, static_cast<size_t>(capacity_));
  }
  ~EmulatedRegion() override { known_memory().remove(base_); }
  void commit(int64_t) override {}

 private:
  std::unique_ptr<Region> memory_;
};

}  // namespace

std::unique_ptr<Region> device_region() { return std::make_unique<EmulatedRegion>(); }

}  // namespace tessera::cuda
