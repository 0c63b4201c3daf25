// A rank's state on its GPU: a stream on which kernels and copies run in call order, and a stream for overlapping
// copies.
//
// An arena on a GPU owns one context (Arena::local). A released block may be allocated again while queued kernels use
// it, because the next write is queued after them.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>

#include "tensor/cuda/runtime.h"
#include "tensor/tensor.h"

namespace tessera::cuda {

// Deferred index checks: a kernel records and skips an invalid index, and the next wait for the stream throws the CPU's
// error.

// Fields of the message "[embedding] id 70000 at position 12 is outside [0, 50304)".
struct Indices {
  const char* op = "";
  const char* what = "";   // "id"
  const char* where = "";  // "at position"
  int64_t limit = 0;
};

// The first index outside [0, limit) is recorded in `first`: position in the upper, value in the lower 32 bits; the
// minimum wins, so the result does not depend on timing.
struct Bounds {
  unsigned long long* first = nullptr;
  int64_t limit = 0;
};

// One stream's recorded errors, in pinned memory.
class IndexChecks {
 public:
  IndexChecks();
  // One slot per op and limit; null if none is free (see clear()).
  Bounds bounds(const Indices& indices);
  // Throws Error for the first recorded error and clears all. No queued work may be running.
  void report();
  void clear();
  // Per slot: kNone or the recorded error.
  std::span<const unsigned long long> complaints();

  static constexpr unsigned long long kNone = ~0ull;

 private:
  static constexpr size_t kMax = 64;

  std::mutex mutex_;
  Handle<void*, cudaFreeHost> memory_;
  unsigned long long* first_ = nullptr;
  std::array<Indices, kMax> known_;
  size_t count_ = 0;
};

class Context {
 public:
  Context();  // on the calling thread's GPU
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  cudaStream_t stream() const { return stream_.get(); }
  cudaStream_t copies() const { return copies_.get(); }
  int gpu() const { return gpu_; }
  int64_t max_shared() const { return max_shared_; }

  void queued(const char* op, cudaError_t result) {
    check(result, op);
    last_op_.store(op, std::memory_order_relaxed);
  }
  // Waits for all queued work. Reports failed kernels, with the op queued last, and invalid indices. Throws Error
  // during capture.
  void synchronize();
  void finish() noexcept;                         // waits for both streams, ignores errors
  void require_no_capture(const char* op) const;  // throws before anything is queued
  const char* last_op() const { return last_op_.load(std::memory_order_relaxed); }
  int64_t synchronizations() const { return synchronizations_; }
  Bounds bounds(const Indices& indices);
  // For kernels that must detect invalid indices before the host does.
  std::span<const unsigned long long> complaints() { return indices_.complaints(); }

  // Between these calls, work is captured (tensor/cuda/gpus.h).
  void begin_capture();
  // Succeeds without a graph if there was no capture.
  cudaError_t end_capture(cudaGraph_t& graph);
  bool is_capturing() const { return capturing_; }

 private:
  int gpu_ = 0, max_shared_ = 0;
  Stream stream_, copies_;
  std::atomic<const char*> last_op_ = "start";
  IndexChecks indices_;
  std::atomic<int64_t> synchronizations_ = 0;
  std::atomic<bool> capturing_ = false;
};

inline Context& context(const Tensor& t) { return t.arena()->local<Context>(); }

}  // namespace tessera::cuda
