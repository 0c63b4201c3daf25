// State of a rank on its GPU: its stream, on which kernels and copies run in call order, and a second stream for copies
// that overlap with them.
//
// An arena on a GPU owns one context (Arena::local), which is therefore reachable from any tensor. A released block may
// be allocated again while queued kernels still use it: stream order protects it, because the next write is queued
// after them.
#pragma once
#include <atomic>

#include "tensor/cuda/runtime.h"
#include "tensor/tensor.h"

namespace tessera::cuda {

// Deferred index checks: a kernel records and skips an index that is out of range, and the next wait for the stream
// throws the error that the CPU's code would have thrown.

// Fields of the message "[embedding] id 70000 at position 12 is outside [0, 50304)".
struct Indices {
  const char* op = "";
  const char* what = "";   // "id"
  const char* where = "";  // "at position"
  int64_t limit = 0;
};

// Kernel argument: valid indices are in [0, limit). The first invalid one is recorded in `first`, with its position in
// the upper and its value in the lower 32 bits; the minimum wins, so the result does not depend on timing.
struct Bounds {
  unsigned long long* first = nullptr;
  int64_t limit = 0;
};

// Recorded errors of one stream, in host memory that the GPU writes to.
class IndexChecks {
 public:
  IndexChecks();
  // Bounds of the given indices, with one slot per op and limit; null if no slot is free (see clear()).
  Bounds bounds(const Indices& indices);
  // Throws Error for the first recorded error and forgets all. No queued work may be running.
  void report();
  void clear();  // frees the slots
  // The slots in use; each is kNone or a recorded error.
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
  int64_t max_shared() const { return max_shared_; }  // maximum bytes of shared memory per block

  // Records that `op` was queued; throws if that failed.
  void queued(const char* op, cudaError_t result) {
    check(result, op);
    last_op_.store(op, std::memory_order_relaxed);
  }
  // Waits for all queued work. Reports a failed kernel, with the name of the op queued last, and out-of-range indices.
  // Throws Error during stream capture: captured work does not run, so there is nothing to wait for.
  void synchronize();
  void finish() noexcept;                         // waits for both streams and ignores errors: for the end of the arena
  void require_no_capture(const char* op) const;  // throws if captured, before anything is queued
  const char* last_op() const { return last_op_.load(std::memory_order_relaxed); }
  int64_t synchronizations() const { return synchronizations_; }  // number of host waits
  // Bounds for a kernel that receives such indices.
  Bounds bounds(const Indices& indices);
  // For kernels that must compute_stats about out-of-range indices before the host does.
  std::span<const unsigned long long> complaints() { return indices_.complaints(); }

  // Between these calls, work is captured instead of run (tensor/cuda/gpus.h).
  void begin_capture();
  // Succeeds without a graph if no capture was begun.
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
