// GPUs, their memory regions and CUDA graphs: the interface for code that includes no CUDA headers (copies are in
// tensor/cuda/copy.h).
#pragma once

#include "tensor/arena.h"

namespace tessera::cuda {

int gpu_count();  // 0 without a driver
// Whether this program was built with float64 kernels (-DTESSERA_FLOAT64_KERNELS), which are used for verification.
// Without them, ops on float64 tensors on a GPU throw Error, except copies, sums and loss reductions.
bool has_float64_kernels();
// "NVIDIA H200, 132 multiprocessors, 139.7 GiB" for the calling thread's GPU.
std::string describe_gpu();
// Why the calling thread's GPU does not support bfloat16 matmuls; empty if it does.
std::string refuses_bfloat16();
// "GPUs 0 and 1": the first two of `count` GPUs without peer access to each other; empty if all have it.
std::string gpus_apart(int count);
// Makes `gpu` current for the calling thread. Throws Error (status 2) if it does not exist or this program contains no
// code for it.
void use_gpu(int gpu);

// Memory regions that GPU kernels can access.

// Reserves addresses for all memory of the calling thread's GPU and maps it on demand, so that ranks on one GPU share
// its memory as needed. Throws an Error that names the cause if there is no GPU, or if the driver or a container does
// not support virtual memory management.
std::unique_ptr<Region> device_region();

// Creates the stream of an arena on the calling thread's GPU. It must precede all other Arena::local state, so that it
// is destroyed last. The arena's end waits for all queued work, which may use that state.
void open_stream(Arena& arena);
void finish_stream(Arena& arena) noexcept;

// Pinned (page-locked) host memory, which kernels of every GPU access over the bus at the host's addresses. Throws an
// Error that names the cause if the GPU does not support it or the system cannot pin more.
std::unique_ptr<Region> pinned_region();

// CUDA graph of the work that a function queues on a rank's GPU; launch() queues it again without running the function.
//
// The graph contains addresses. Those of temporary blocks remain valid as long as the arena starts with the same layout
// as at capture, because then no other block overlaps them while the graph runs, and later work is queued after it.
// Call fits() before each launch().

class Graph {
 public:
  // Captures the work that f() queues on the arena's stream, without running it; calls f() once. Throws exceptions of
  // f(), Error if f() waits for the GPU (a host read) or needs more memory than the arena has, and an Error that names
  // CUDA's cause.
  Graph(ArenaPtr arena, const std::function<void()>& f);

  // Whether the arena has the same layout as at capture.
  bool fits() const { return arena_->layout() == layout_; }
  // Queues the graph. The next wait reports errors of its kernels.
  void launch() const;

 private:
  ArenaPtr arena_;
  Arena::Layout layout_;
  std::shared_ptr<void> executable_;
};

// Number of host waits for the arena's GPU.
int64_t synchronizations(Arena& arena);

}  // namespace tessera::cuda
