// Matmuls.
//
// On the CPU, float32 and bfloat16 use oneDNN (accumulated in float32, rounded once); bfloat16 uses Tessera's AMX
// kernel if the CPU has AMX tiles, and float64 Tessera's blocked kernel. On a GPU all dtypes use cuBLASLt
// (cuda/gemm.h).
#pragma once

#include "tensor/tensor.h"

namespace tessera {

// (..., M, K) x (..., K, N) -> (..., M, N) with equal leading dims, or (..., M, K) x (K, N). Any strides. Throws Error
// if K or the dtypes differ. Cost: 2 M N K FLOPs per matrix; on a GPU a copy of each operand that is not contiguous.
Tensor matmul(const Tensor& a, const Tensor& b);
// out (M, N) = a (M, K) b (K, N) for 2-D views; out has contiguous rows and may be float32 if a and b are bfloat16. On
// a GPU an operand may be packed or the transpose of a packed matrix, and the bits may depend on which it is.
void matmul_into(Tensor& out, const Tensor& a, const Tensor& b);

// Packed copies of a weight, created on first use after each optimizer step (Storage::version).
struct PackedWeights {
  // The right-hand operand in the layout of the CPU's GEMM.
  struct Packed {
    Tensor bytes;      // opaque, Category::workspace
    int64_t rows = 0;  // the M for which it was packed
    bool transposed = false;
    uint64_t version = 0;  // version of the source's storage at packing
    const std::byte* source = nullptr;
    int threads = 0;  // the layout may depend on the number of threads
  };
  std::vector<Packed> packs;
};

// Linear layer y = x w^T + b. x (..., K), w (N, K), b (N) or undefined -> (..., N).
Tensor linear(const Tensor& x, const Tensor& w, const Tensor& b, PackedWeights* packs = nullptr);
// As linear(), for x (M, K) into y (M, N) with contiguous rows.
void linear_into(Tensor& y, const Tensor& x, const Tensor& w, const Tensor& b, PackedWeights* packs = nullptr);
// dx = dy w: (..., N) -> (..., K).
Tensor linear_input_grad(const Tensor& dy, const Tensor& w, PackedWeights* packs = nullptr);
// As linear_input_grad(), for dy (M, N) into dx (M, K) with contiguous rows.
void linear_input_grad_into(Tensor& dx, const Tensor& dy, const Tensor& w, PackedWeights* packs = nullptr);
// dw (N, K) = dy^T x, over all rows; overwrites dw, which may be float32 if dy is bfloat16.
void linear_weight_grad(Tensor& dw, const Tensor& dy, const Tensor& x);

namespace cpu {
// False if oneDNN has no bfloat16 matmul for this machine (no AVX-512): the matmul is then computed in float32 from the
// same inputs, with the same rounding, and the program prints a notice once.
bool has_bfloat16_matmul();
// Whether packed copies of all weights (in oneDNN's layout or in tiles) justify their memory, twice that of the
// weights: with AMX, where plain strides have a slow case. Without AMX packing does not accelerate forward matmuls, and
// input gradients gain as much from a temporary copy (docs/measurements.md).
bool packing_is_profitable();
// Version and instruction set for the log of a run: "oneDNN 2.6.3, avx512_core_bf16".
std::string matmul_library();
}  // namespace cpu

namespace cuda {
// out (M, N) = a (M, K) b (K, N) + bias (N), batched if all three have a leading dim. cuBLASLt receives packed matrices
// aligned to 16 bytes: an a or b that is neither packed nor the transpose of a packed matrix is copied first; an out
// that is not packed (its rows must be contiguous) is computed in a temporary; and all three are padded to rows of a
// multiple of 8 elements if the library has no algorithm otherwise (counted in KernelLog). out has the dtype of a and
// b, or float32; bias is undefined, or contiguous with out's dtype. bfloat16 and float32 are accumulated in float32 and
// rounded once.
void matmul(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias);

// Matmuls fused with the adjacent elementwise pass, used if they were measured to be faster on this GPU than matmul()
// and a separate kernel. Each returns false without side effects if they were not, if the library has no such matmul,
// for dtypes other than bfloat16, and in deterministic mode. Operands as for matmul(), all on one GPU.

// h = a b + bias, y = gelu(h) of the unrounded sum: the fused form of tensor/ops/activations.h.
bool matmul_gelu(const Tensor& y, const Tensor& h, const Tensor& a, const Tensor& b, const Tensor& bias);
// dh = (a b) gelu'(h) of the unrounded sum. Does not compute the row sums of dh, which the separate pass would write to
// dbias (float32; undefined if not needed); the comparison includes their cost as a separate pass.
bool matmul_gelu_gradient(const Tensor& dh, const Tensor& a, const Tensor& b, const Tensor& h, const Tensor& dbias);
// out = a b, and `sums` (M) = the row sums of a, with out's dtype: the gradients of a weight and its bias if a is dy^T.
// `a` must be the transpose of a matrix with contiguous rows.
bool matmul_and_sums(const Tensor& out, const Tensor& sums, const Tensor& a, const Tensor& b);
}  // namespace cuda

}  // namespace tessera
