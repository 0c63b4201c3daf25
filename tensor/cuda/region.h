// The regions that a GPU's kernels reach.
#pragma once
#include <memory>

#include "tensor/arena.h"

namespace tessera {

class Arena;
}

namespace tessera::cuda {

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

}  // namespace tessera::cuda
