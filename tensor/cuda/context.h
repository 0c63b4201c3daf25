// A rank's own things on its GPU: its stream, on which its kernels and copies run in the order they are called, and
// another one for copies that run beside them.
//
// An arena on a GPU holds one context (Arena::local), so any tensor leads to it. Blocks that the arena takes back may
// be handed out again while older kernels still use them: whatever writes to them next is queued behind those.
#pragma once
#include <atomic>

#include "tensor/cuda/runtime.h"
#include "tensor/tensor.h"

namespace tessera::cuda {

// Integers that kernels take for places in a table: where one lies outside, the kernel notes it and leaves it out, and
// whoever waits for the stream next is told, with the words that the CPU's code would have used.

// How a complaint reads: "[embedding] id 70000 at position 12 is outside [0, 50304)".
struct Indices {
  const char* op = "";
  const char* what = "";   // "id"
  const char* where = "";  // "at position"
  int64_t limit = 0;
};

// Bounds that a kernel is given: indices in [0, limit) are inside, and the first one outside is noted at `first`, as
// its place in the upper and its value in the lower 32 bits. The lowest stays, so it does not matter who comes first.
struct Bounds {
  unsigned long long* first = nullptr;
  int64_t limit = 0;
};

// The complaints of one stream, in memory of the host that the GPU writes to.
class IndexChecks {
 public:
  IndexChecks();
  // The bounds of such indices. One slot for each op and limit; null when they have run out (see clear()).
  Bounds bounds(const Indices& indices);
  // To be called when nothing that was queued is still running. Throws Error for the first complaint, and forgets all.
  void report();
  void clear();  // gives the slots back
  // The slots in use; each is kNone or a complaint.
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

// The context of an arena.
class Context {
 public:
  Context();  // on the calling thread's GPU
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  cudaStream_t stream() const { return stream_.get(); }
  cudaStream_t copies() const { return copies_.get(); }
  int gpu() const { return gpu_; }
  int64_t most_shared() const { return most_shared_; }  // bytes of shared memory that a block may have

  // Notes that `op` was queued, and throws if that failed.
  void queued(const char* op, cudaError_t result) {
    check(result, op);
    last_op_.store(op, std::memory_order_relaxed);
  }
  // Waits for all that was queued. A kernel that failed is reported here, with the name of the op queued last, and so
  // is an index that a kernel found outside its bounds. Throws Error while the stream is captured: what is captured
  // does not run, so there is nothing to wait for.
  void synchronize();
  void finish() noexcept;                    // waits for both streams, whatever has failed: at the end of the arena
  void about_to_wait(const char* op) const;  // throws that, before anything is queued
  const char* last_op() const { return last_op_.load(std::memory_order_relaxed); }
  int64_t synchronizations() const { return synchronizations_; }  // how often the host has waited here
  // For a kernel that is given such indices.
  Bounds bounds(const Indices& indices);
  // Where kernels note what they find outside, for kernels that want to know of it before the host does.
  std::span<const unsigned long long> complaints() { return indices_.complaints(); }

  // Between these two, what is queued is kept and does not run (tensor/cuda/gpus.h).
  void begin_capture();
  // Success without a graph when none was begun.
  cudaError_t end_capture(cudaGraph_t& graph);
  bool is_capturing() const { return capturing_; }

 private:
  int gpu_ = 0, most_shared_ = 0;
  Stream stream_, copies_;
  std::atomic<const char*> last_op_ = "start";
  IndexChecks indices_;
  std::atomic<int64_t> synchronizations_ = 0;
  std::atomic<bool> capturing_ = false;
};

inline Context& context(const Tensor& t) { return t.arena()->local<Context>(); }

}  // namespace tessera::cuda
