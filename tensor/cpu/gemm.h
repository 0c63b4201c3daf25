// Our own matrix product for the dtypes that no library serves: float64, which verification runs in.
#pragma once
#include "tensor/cpu/tile_gemm.h"

namespace tessera::cpu {

// C (m x n, rows ldc apart) = A (m x k) B (k x n), all operands of any strides. Threads split rows and columns of C,
// never k, so the bits of an element depend neither on the threads nor on the rows beside it. Cost: 2 m n k FLOPs; B is
// copied once in panels.
template <class T>
void gemm(int64_t m, int64_t n, int64_t k, Strided<T> a, Strided<T> b, T* c, int64_t ldc);

}  // namespace tessera::cpu
