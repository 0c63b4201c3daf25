// Matrix products of bfloat16 on the processor's tiles.
//
// oneDNN 2.6 reaches a third of the tiles' peak on a training step's products and packs weights at 2 GB/s; this reaches
// more than twice that (docs/measurements.md). Sums run along the inner dim in order, in tiles of 32, and do not depend
// on the number of threads.
#pragma once
#include "tensor/cpu/dnnl_matmul.h"
#include "tensor/tensor.h"

namespace tessera::cpu {

// Whether amx_matmul() takes these operands: bfloat16, tiles in the processor, and not too small to fill one.
bool amx_takes(const Tensor& a, const Tensor& b);

// out (M, N) = a (M, K) b (K, N) + bias (N), under the contract of dnnl_matmul(). `packed`, when given, keeps b in
// tiles until its version changes.
void amx_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, Packed* packed);

}  // namespace tessera::cpu
