// The door to oneDNN: matrix products in float32 and bfloat16, with compiled primitives kept per rank.
//
// oneDNN compiles a kernel for each shape at run time for the instruction set it finds (AVX2, AVX-512, AMX). Its header
// is included in one .cpp only, which compiles with versions 2.6 and 3.x.
#pragma once
#include "tensor/tensor.h"

namespace tessera::cpu {

// The matrix a step needs again and again as the right-hand operand, in the layout that oneDNN prefers.
struct Packed {
  Tensor bytes;      // opaque, Category::workspace
  int64_t rows = 0;  // the M it was packed for
  bool transposed = false;
  uint64_t version = 0;  // of the source's storage when it was packed
  const std::byte* source = nullptr;
  int threads = 0;  // the layout may depend on them
};

// out (M, N) = a (M, K) b (K, N) + bias (N). Views of any strides with one unit stride for a and b; out has contiguous
// rows. a and b have one dtype, float32 or bfloat16; out has that dtype or float32; bias is undefined or of out's
// dtype. Products are summed in float32 and rounded once. Cost: 2 M N K FLOPs.
void dnnl_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias);
// The same with b packed; packs it first when `packed` is empty or stale.
void dnnl_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, Packed& packed);

// False where oneDNN has no bfloat16 product for this machine (no AVX-512): the product is then made in float32 of the
// rounded inputs, with the same roundings, and the program says so once.
bool has_bfloat16_matmul();
// Whether copies of all weights in the layout that oneDNN prefers, or in tiles, are worth their memory, twice that of
// the weights: with AMX, where plain strides have a slow case. Without it forward products gain nothing by them, and
// input gradients gain as much by a copy that is gone after the product (docs/measurements.md).
bool packing_pays();
// Version and instruction set, for the log of a run: "oneDNN 2.6.3, avx512_core_bf16".
std::string matmul_library();

}  // namespace tessera::cpu
