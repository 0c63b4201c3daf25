// CUDA runtime errors as exceptions, and owning handles.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace tessera::cuda {

// For a call that may fail. Clears the error that the runtime would store, because NVIDIA's libraries query the last
// error after their launches and would report it as theirs.
inline cudaError_t expected(cudaError_t result) {
  if (result != cudaSuccess) cudaGetLastError();
  return result;
}

inline void check(cudaError_t result, const char* op) {
  if (expected(result) != cudaSuccess)
    throw Error("[" + std::string(op) + "] CUDA: " + cudaGetErrorString(result), Status::communication);
}

template <class T, auto destroy>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T value) : value_(value) {}
  Handle(Handle&& other) noexcept : value_(std::exchange(other.value_, T{})) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~Handle() {
    if (value_ != T{}) destroy(value_);
  }
  T get() const { return value_; }
  T* receive() { return &value_; }

 private:
  T value_{};
};

using Stream = Handle<cudaStream_t, cudaStreamDestroy>;
using Event = Handle<cudaEvent_t, cudaEventDestroy>;

inline Event make_event() {
  Event event;
  check(cudaEventCreateWithFlags(event.receive(), cudaEventDisableTiming), "event");
  return event;
}

}  // namespace tessera::cuda
