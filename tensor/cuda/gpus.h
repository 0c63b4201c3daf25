// The GPUs that there are, a rank's memory on one of them, and its work there kept as a graph: all that code which
// includes no CUDA knows of them, but for copies (tensor/cuda/copy.h).
#pragma once

#include "tensor/arena.h"

namespace tessera::cuda {

int gpu_count();  // 0 where there is no driver
// Whether this program was built with kernels of float64 (-DTESSERA_FLOAT64_KERNELS), which serve checks. Without them
// ops of float64 tensors on a GPU throw Error, but for copies, sums and what adds up losses.
bool has_float64_kernels();
// "NVIDIA H200, 132 multiprocessors, 139.7 GiB" of the calling thread's GPU.
std::string describe_gpu();
// The reason why the calling thread's GPU makes no products of bfloat16; empty: it makes them.
std::string refuses_bfloat16();
// "GPUs 0 and 1": the first two of `count` of which one does not reach the other's memory; empty: all do.
std::string gpus_apart(int count);
// Makes `gpu` the calling thread's. Throws Error (status 2) in one line when there is none of that number, or when this
// program holds no code for it.
void use_gpu(int gpu);

// The regions that a GPU's kernels reach.

// Addresses for all the memory of the calling thread's GPU, mapped to it piece by piece as they are handed out, so that
// ranks that share a card share its memory by need. Throws Error naming the cause when there is no GPU, or when the
// driver or a container around the program does not manage virtual memory.
std::unique_ptr<Region> device_region();

// Makes the stream of an arena on the calling thread's GPU, before all else that the arena keeps (Arena::local), and so
// it goes last. Waits at the arena's end for all that is queued, which may use what the arena keeps.
void open_stream(Arena& arena);
void finish_stream(Arena& arena) noexcept;

// Host memory of which no page can be moved or swapped out, so that kernels of every GPU reach it over the bus, at the
// host's own addresses. Throws Error naming the cause when the GPU cannot, or the system pins no more.
std::unique_ptr<Region> pinned_region();

// The work that a function queues on a rank's GPU, kept as a CUDA graph and queued again at once, without running the
// function.
//
// The graph holds addresses. Those of blocks that the function asks for and gives back are right as long as the arena
// begins with the layout that it had when the function was captured: then nobody else holds them while the graph runs,
// and what comes later is queued behind it. fits() says so, and who launches asks it first.

class Graph {
 public:
  // Calls f() once. What it queues on the arena's stream is kept and does not run. Throws what f() throws, Error when
  // f() waits for the GPU (a host that reads) or needs memory that the arena has not, and Error naming CUDA's cause.
  Graph(ArenaPtr arena, const std::function<void()>& f);

  // Whether the arena is as it was.
  bool fits() const { return arena_->layout() == layout_; }
  // Queues all of it. An error of a kernel is found by the next wait.
  void launch() const;

 private:
  ArenaPtr arena_;
  Arena::Layout layout_;
  std::shared_ptr<void> executable_;
};

// How often the host has waited for the arena's GPU.
int64_t synchronizations(Arena& arena);

}  // namespace tessera::cuda
