// Integers that kernels take for places in a table: where one lies outside, the kernel notes it and leaves it out, and
// whoever waits for the stream next is told, with the words that the CPU's code would have used.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>

#include "tensor/cuda/runtime.h"

namespace tessera::cuda {

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
  static constexpr size_t kMost = 64;

  std::mutex mutex_;
  Handle<void*, cudaFreeHost> memory_;
  unsigned long long* first_ = nullptr;
  std::array<Indices, kMost> known_;
  size_t count_ = 0;
};

}  // namespace tessera::cuda
