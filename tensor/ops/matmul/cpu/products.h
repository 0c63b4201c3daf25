// The CPU's four ways to make a matrix product, for tensor/ops/matmul/matmul.cpp to choose from.
#pragma once
#include <cstdlib>

#include "tensor/cpu/vectorize.h"
#include "tensor/ops/matmul/matmul.h"

namespace tessera::cpu {

using Packed = PackedWeights::Packed;

// oneDNN's, in float32 and bfloat16. It compiles a kernel for each shape at run time for the instruction set it finds
// (AVX2, AVX-512, AMX); these are kept per rank. Its header is included in dnnl.cpp only, which compiles with versions
// 2.6 and 3.x.
//
// out (M, N) = a (M, K) b (K, N) + bias (N). Views of any strides with one unit stride for a and b; out has contiguous
// rows. a and b have one dtype, float32 or bfloat16; out has that dtype or float32; bias is undefined or of out's
// dtype. Products are summed in float32 and rounded once. Cost: 2 M N K FLOPs.
void dnnl_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias);
// The same with b packed; packs it first when `packed` is empty or stale. A weight that the packed layout would pad to
// more than twice its size is used as it is, and `packed` stays empty.
void dnnl_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, Packed& packed);

// Our own of bfloat16 on the processor's tiles: oneDNN 2.6 reaches a third of the tiles' peak on a training step's
// products and packs weights at 2 GB/s; this reaches more than twice that (docs/measurements/cpu_training.md). Sums run
// along the inner dim in order, in tiles of 32, and do not depend on the number of threads.
//
// Whether it takes these operands: bfloat16, tiles in the processor, and not too small to fill one.
bool amx_takes(const Tensor& a, const Tensor& b);
// The same contract as dnnl_matmul(). `packed`, when given, keeps b in tiles until its version changes.
void amx_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, Packed* packed);
#ifndef __x86_64__  // they have no tiles
inline bool amx_takes(const Tensor& /*a*/, const Tensor& /*b*/) { return false; }
inline void amx_matmul(Tensor&, const Tensor&, const Tensor&, const Tensor&, Packed*) { std::abort(); }
#endif

// Our own of few rows, as decoding has them: memory is what they wait for, and oneDNN 2.6 first copies the weight into
// its layout. Here it is read once, as it lies. An element's bits depend neither on the threads nor on the rows beside
// it, and the instruction sets round alike.
//
// Whether it takes these operands of one dtype: at most 8 rows, and both run along the inner dim.
bool few_rows_takes(const Tensor& a, const Tensor& b);
// The same contract as dnnl_matmul(), but that it sums along the inner dim in sixteen lanes.
void few_rows_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias,
                     InstructionSet isa = instruction_set());

// The heart of our own products: C (+)= A B on tiles that lie in cache.
//
// A is read one scalar at a time, so it may have any strides (a transpose costs nothing); B and C are row-major with
// rows that run on. Each element of C is one chain of fused multiply-adds in order of k, so its bits depend neither on
// where it lies nor on the instruction set nor on the threads.

// Elements per 64-byte vector: the tile's n is a multiple of it.
template <class T>
inline constexpr int64_t kLanes = 64 / static_cast<int64_t>(sizeof(T));

// A matrix operand that is read element by element.
template <class T>
struct Strided {
  const T* data;
  int64_t row, col;  // strides
};

// C (m x n) = A (m x k) B (k x n), or += with `accumulate`. n is a multiple of kLanes<T>. T is float or double. All
// instruction sets give the same bits; a test may name another than the best.
template <class T>
void tile_gemm(int64_t m, int64_t n, int64_t k, Strided<T> a, const T* b, int64_t ldb, T* c, int64_t ldc,
               bool accumulate, InstructionSet isa = instruction_set());

// Our own: of float64, which no library serves and verification runs in, and of any number of rows in float32
// (tensor/ops/experts/experts.h). C (m x n, rows ldc apart) = A (m x k) B (k x n), all operands of any strides. Threads
// split rows and columns of C, never k, so the bits of an element depend neither on the threads nor on the rows beside
// it. Cost: 2 m n k FLOPs; B is copied once in panels.
template <class T>
void gemm(int64_t m, int64_t n, int64_t k, Strided<T> a, Strided<T> b, T* c, int64_t ldc);

}  // namespace tessera::cpu
