// The region that an arena on a GPU hands out.
#pragma once
#include <memory>

#include "tensor/region.h"

namespace tessera::cuda {

// Addresses for all the memory of the calling thread's GPU, mapped to it piece by piece as they are handed out, so that
// ranks that share a card share its memory by need. Throws Error naming the cause when there is no GPU.
std::unique_ptr<Region> device_region();

}  // namespace tessera::cuda
