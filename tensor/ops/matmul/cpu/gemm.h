// The CPU's GEMMs, from which tensor/ops/matmul/matmul.cpp selects.
#pragma once
#include <cstdint>
#include <cstdlib>

#include "tensor/cpu/vectorize.h"
#include "tensor/ops/matmul/matmul.h"

namespace tessera::cpu {

using Packed = PackedWeights::Packed;

// oneDNN compiles a kernel per shape for the available instruction set, cached per rank. Only dnnl.cpp includes its
// header (versions 2.6 and 3.x).
//
// out (M, N) = a (M, K) b (K, N) + bias (N). Views a and b have one stride of 1, out has contiguous rows. a and b have
// the same dtype, float32 or bfloat16; out has that dtype or float32; bias is undefined or has out's dtype. Accumulates
// in float32 and rounds once. Cost: 2 M N K FLOPs.
void dnnl_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias);
// Packs b first if `packed` is empty or stale. If packing would more than double a weight's size, `packed` stays empty.
void dnnl_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, Packed& packed);

// AMX kernel for bfloat16: more than twice as fast as oneDNN 2.6 (docs/measurements/cpu_training.md). Accumulates along
// the inner dim in order, in tiles of 32, independently of threads.
//
// Supports bfloat16 on a CPU with AMX, unless the operands are too small to fill a tile.
bool amx_supports(const Tensor& a, const Tensor& b);
// As dnnl_matmul(). `packed`, if not null, caches b in tiles until its version changes.
void amx_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, Packed* packed);
#ifndef __x86_64__
inline bool amx_supports(const Tensor& /*a*/, const Tensor& /*b*/) { return false; }
inline void amx_matmul(Tensor&, const Tensor&, const Tensor&, const Tensor&, Packed*) { std::abort(); }
#endif

// Few rows, as in decoding, are bound by memory bandwidth: oneDNN 2.6 first copies the weight into its layout, whereas
// this kernel reads it once, in place. Results do not depend on threads, other rows or the instruction set.
//
// Supports operands of equal dtype with at most 8 rows, both contiguous along the inner dim.
bool few_rows_supports(const Tensor& a, const Tensor& b);
// As dnnl_matmul(), but accumulates along the inner dim in sixteen lanes.
void few_rows_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias,
                     InstructionSet isa = instruction_set());

// Micro-kernel: C (+)= A B on tiles in cache.
//
// A may have any strides (a transpose is free); B and C are row-major with contiguous rows. Each element of C is one
// chain of fused multiply-adds in order of k, bitwise independent of position, instruction set and threads.

// Elements per 64-byte vector.
template <class T>
inline constexpr int64_t kLanes = 64 / static_cast<int64_t>(sizeof(T));

template <class T>
struct Strided {
  const T* data;
  int64_t row, col;
};

// C (m x n) = A (m x k) B (k x n), or += with `accumulate`, for float and double; n is a multiple of kLanes<T>.
template <class T>
void tile_gemm(int64_t m, int64_t n, int64_t k, Strided<T> a, const T* b, int64_t ldb, T* c, int64_t ldc,
               bool accumulate, InstructionSet isa = instruction_set());

// For float64, which oneDNN does not support, and for any number of rows in float32 (tensor/ops/experts/experts.h). C
// (m x n, row stride ldc) = A (m x k) B (k x n), any strides. Threads split rows and columns of C, never k, so an
// element is bitwise independent of threads and other rows. Cost: 2 m n k FLOPs; B is copied once in panels.
template <class T>
void gemm(int64_t m, int64_t n, int64_t k, Strided<T> a, Strided<T> b, T* c, int64_t ldc);

}  // namespace tessera::cpu
