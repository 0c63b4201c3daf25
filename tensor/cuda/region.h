// The regions that a GPU's kernels reach.
#pragma once
#include <memory>

#include "tensor/region.h"

namespace tessera::cuda {

// Addresses for all the memory of the calling thread's GPU, mapped to it piece by piece as they are handed out, so that
// ranks that share a card share its memory by need. Where the driver cannot do that, plain_region(), and the region's
// note() says why. Throws Error naming the cause when there is no GPU.
std::unique_ptr<Region> device_region();

// Memory of the calling thread's GPU that is taken at once: nine tenths of what is free. Throws OutOfMemory.
std::unique_ptr<Region> plain_region(const std::string& why);
// What the environment asks for: TESSERA_GPU_ARENA=plain, or plain:GIB for so many GiB; null: nothing.
std::unique_ptr<Region> asked_region();

// Host memory of which no page can be moved or swapped out, so that kernels of every GPU reach it over the bus, at the
// host's own addresses. Throws Error naming the cause when the GPU cannot, or the system pins no more.
std::unique_ptr<Region> pinned_region();

}  // namespace tessera::cuda
