// GPUs, their memory regions and CUDA graphs, without CUDA headers.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tensor/arena.h"

namespace tessera::cuda {

int gpu_count();  // 0 without a driver
// Whether there are float64 kernels (-DTESSERA_FLOAT64_KERNELS), for verification. Otherwise, float64 ops on a GPU
// throw Error, except copies, sums and loss reductions.
bool has_float64_kernels();
// For the thread's GPU: "NVIDIA H200, 132 multiprocessors, 139.7 GiB".
std::string describe_gpu();
// Why the thread's GPU does not support bfloat16 matmuls; empty if it does.
std::string refuses_bfloat16();
// "GPUs 0 and 1": the first two of `count` GPUs without peer access; empty if there are none.
std::string gpus_apart(int count);
// Makes `gpu` the thread's GPU. Throws Error (status 2) if it does not exist or the program contains no code for it.
void use_gpu(int gpu);

// Reserves address space for all memory of the thread's GPU and maps it on demand, so that ranks on one GPU share its
// memory. Throws Error without a GPU, or if the driver or container does not support virtual memory management.
std::unique_ptr<Region> device_region();

// Creates an arena's stream on the thread's GPU, before all other Arena::local state, so that it is destroyed last: the
// arena's destructor waits for queued work, which may use that state.
void open_stream(Arena& arena);
void finish_stream(Arena& arena) noexcept;

// Pinned host memory, which kernels of every GPU access over the bus at the host's addresses. Throws Error if the GPU
// does not support it or the system cannot pin more.
std::unique_ptr<Region> pinned_region();

// CUDA graph of the work that a function queues on a rank's GPU.
//
// The graph contains addresses of temporary blocks. They remain valid if the arena starts with the same layout as at
// capture, because then no other block overlaps them while the graph runs: call fits() before each launch().

class Graph {
 public:
  // Captures, without running it, the work that f() queues on the arena's stream. Propagates exceptions of f(); throws
  // Error if f() waits for the GPU, needs more memory than the arena has, or CUDA fails.
  Graph(ArenaPtr arena, const std::function<void()>& f);

  bool fits() const { return arena_->layout() == layout_; }
  // The next wait reports kernel errors.
  void launch() const;

 private:
  ArenaPtr arena_;
  Arena::Layout layout_;
  std::shared_ptr<void> executable_;
};

int64_t synchronizations(Arena& arena);

}  // namespace tessera::cuda
