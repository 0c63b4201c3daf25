// How a kernel is started: on the stream of a tensor's arena, under the name of its op.
#pragma once
#include <cstdint>

#include "tensor/cuda/context.h"

namespace tessera::cuda {

inline constexpr int kThreads = 256;  // of a block, where nothing asks for another number

struct Grid {
  int64_t blocks = 0;
  int threads = kThreads;
  int shared = 0;  // bytes of shared memory whose size is given at the launch
};

// Queues kernel(args...). Does nothing for a grid of no blocks. At most 2^31 - 1 blocks.
template <class... Parameters, class... Args>
void launch(Context& c, const char* op, const Grid& grid, void (*kernel)(Parameters...), const Args&... args) {
  if (grid.blocks == 0) return;
  if (grid.shared > 48 * 1024)
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               grid.shared),
          op);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared);
  config.stream = c.stream();
  c.queued(op, cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(args)...));
}

constexpr int64_t blocks_for(int64_t n, int64_t per_block) { return (n + per_block - 1) / per_block; }

}  // namespace tessera::cuda
