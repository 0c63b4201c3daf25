// The work that a function queues on a rank's GPU, kept as a CUDA graph and queued again at once, without running the
// function.
//
// The graph holds addresses. Those of blocks that the function asks for and gives back are right as long as the arena
// begins with the layout that it had when the function was captured: then nobody else holds them while the graph runs,
// and what comes later is queued behind it. fits() says so, and who launches asks it first.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>

#include "tensor/arena.h"

namespace tessera::cuda {

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
