// GPU instructions: tensor-core matmuls of bfloat16, matrix loads from shared memory and asynchronous copies into it
// (PTX ISA, "mma.m16n8k16", "ldmatrix", "cp.async"), and others. The emulator replaces this file with
// tests/cuda_emulator/tensor/cuda/mma.cuh.
//
// GPUs before compute capability 8.0 lack mma and cp.async: copies become loads and stores, and a bfloat16 matmul
// traps. Plans for such GPUs exclude bfloat16 (train/device.h).
//
// Fragments of lane l, in pairs of adjacent elements:
//
//   A (16 x 16)   rows l/4 and l/4 + 8, columns from 2 (l%4) and from 2 (l%4) + 8: a[0] upper left, a[1] lower left,
//                 a[2] upper right, a[3] lower right
//   B (16 x 8)    column l/4, rows from 2 (l%4) (b0) and from 2 (l%4) + 8 (b1)
//   D (16 x 8)    columns from 2 (l%4), rows l/4 (d[0], d[1]) and l/4 + 8 (d[2], d[3])
#pragma once
#include <cstdint>

#include "tensor/dtype.h"

namespace tessera::cuda {

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Copies 16 bytes or writes zeros; completes with the next committed group.
__device__ inline void copy_async(uint32_t to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#else
  const int4 all = valid ? *static_cast<const int4*>(from) : int4{};
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(all.x), "r"(all.y), "r"(all.z), "r"(all.w)
               : "memory");
#endif
}
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kLeft>
__device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

// Four 8 x 8 matrices of 2-byte elements; lane l passes the address of row l%8 of matrix l/8, and receives from each
// matrix the pair at row l/4, columns 2 (l%4) and the next.
__device__ inline void load_matrices(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}
// Transposed: lane l receives the pair at rows 2 (l%4) and the next, column l/4.
__device__ inline void load_transposed(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

__device__ inline void multiply_add([[maybe_unused]] float (&d)[4], [[maybe_unused]] const uint32_t (&a)[4],
                                    [[maybe_unused]] uint32_t b0, [[maybe_unused]] uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  __trap();
#endif
}

// Rounds to nearest even; `first` is in the low half.
__device__ inline uint32_t pack_pair(float first, float second) {
#if __CUDA_ARCH__ >= 800
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return bfloat16(first).bits | uint32_t{bfloat16(second).bits} << 16;
#endif
}

// 2^x to about two ulps; 0 for -infinity.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Aligned to 1,024 bytes.
template <class T>
__device__ T* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char bytes[];
  return reinterpret_cast<T*>(bytes);
}

__device__ inline void fetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

}  // namespace tessera::cuda
