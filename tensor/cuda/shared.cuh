// Shared memory whose size is given at the launch, aligned to 1,024 bytes, and a hint to the L2 cache. (The emulator of
// tests/cuda_emulator has its own file of this name.)
#pragma once

namespace tessera::cuda {

template <class T>
__device__ T* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char bytes[];
  return reinterpret_cast<T*>(bytes);
}

// The line that holds `p` is read soon.
__device__ inline void fetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

}  // namespace tessera::cuda
