// Shared memory whose size is given at the launch, aligned to 1,024 bytes. (The emulator of tests/cuda_emulator has its
// own file of this name.)
#pragma once

namespace tessera::cuda {

template <class T>
__device__ T* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char bytes[];
  return reinterpret_cast<T*>(bytes);
}

}  // namespace tessera::cuda
