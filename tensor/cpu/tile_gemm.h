// The heart of our own matrix products: C (+)= A B on tiles that lie in cache.
//
// A is read one scalar at a time, so it may have any strides (a transpose costs nothing); B and C are row-major with
// rows that run on. Each element of C is one chain of fused multiply-adds in order of k, so its bits depend neither on
// where it lies nor on the instruction set nor on the threads.
#pragma once
#include <cstdint>

#include "tensor/cpu/vectorize.h"

namespace tessera::cpu {

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

}  // namespace tessera::cpu
