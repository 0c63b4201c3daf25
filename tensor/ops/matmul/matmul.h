// Matrix products.
//
// float32 and bfloat16 go to oneDNN (sums in float32, one rounding), or where the processor has AMX tiles, in bfloat16,
// to our own kernel; float64 to our own blocked kernel; on a GPU all of them go to cuBLASLt (cuda/product.h).
#pragma once

#include "tensor/tensor.h"

namespace tessera {

// (..., M, K) x (..., K, N) -> (..., M, N) with equal leading dims, or (..., M, K) x (K, N). Any strides. Throws when
// the inner dims or the dtypes differ. Cost: 2 M N K FLOPs per matrix; on a GPU a copy of each operand that is not
// contiguous.
Tensor matmul(const Tensor& a, const Tensor& b);
// out (M, N) = a (M, K) b (K, N): for 2-D views; out has contiguous rows and may be float32 where a and b are bfloat16.
// On a GPU an operand may lie packed or as the transpose of a packed one, and the bits may depend on which it is.
void matmul_into(Tensor& out, const Tensor& a, const Tensor& b);

// A weight's copies in packed layout, made when they are first needed after each optimizer step (Storage::version).
struct PackedWeights {
  // The right-hand operand in the layout that the CPU's product prefers.
  struct Packed {
    Tensor bytes;      // opaque, Category::workspace
    int64_t rows = 0;  // the M it was packed for
    bool transposed = false;
    uint64_t version = 0;  // version of the source's storage when it was packed
    const std::byte* source = nullptr;
    int threads = 0;  // the layout may depend on them
  };
  std::vector<Packed> packs;
};

// The linear layer y = x w^T + b. x (..., K), w (N, K), b (N) or undefined -> (..., N).
Tensor linear(const Tensor& x, const Tensor& w, const Tensor& b, PackedWeights* packs = nullptr);
// The same for x (M, K) into y (M, N), whose rows run on.
void linear_into(Tensor& y, const Tensor& x, const Tensor& w, const Tensor& b, PackedWeights* packs = nullptr);
// dx = dy w: (..., N) -> (..., K).
Tensor linear_input_grad(const Tensor& dy, const Tensor& w, PackedWeights* packs = nullptr);
// The same for dy (M, N) into dx (M, K), whose rows run on.
void linear_input_grad_into(Tensor& dx, const Tensor& dy, const Tensor& w, PackedWeights* packs = nullptr);
// dw (N, K) = dy^T x, over all rows; overwrites dw, which may be float32 where dy is bfloat16.
void linear_weight_grad(Tensor& dw, const Tensor& dy, const Tensor& x);

namespace cpu {
// False where oneDNN has no bfloat16 product for this machine (no AVX-512): the product is then made in float32 of the
// rounded inputs, with the same roundings, and the program says so once.
bool has_bfloat16_matmul();
// Whether copies of all weights in the layout that oneDNN prefers, or in tiles, are worth their memory, twice that of
// the weights: with AMX, where plain strides have a slow case. Without it forward products gain nothing by them, and
// input gradients gain as much by a copy that is gone after the product (docs/measurements/cpu_training.md).
bool packing_is_profitable();
// Version and instruction set, for the log of a run: "oneDNN 2.6.3, avx512_core_bf16".
std::string matmul_library();
}  // namespace cpu

namespace cuda {
// out (M, N) = a (M, K) b (K, N) + bias (N), or that for each index of a leading dim that all three have. The library
// sees packed matrices at multiples of 16 bytes: a and b that are neither packed nor the transpose of a packed one are
// copied, an out that is not packed, whose rows must run on, is copied to, and all three go through rows of a
// multiple of 8 elements when the library has no algorithm for theirs (KernelLog counts these). out is of the dtype of
// a and b or float32; bias undefined or contiguous and of out's dtype. bfloat16 and float32 are summed in float32 and
// rounded once.
void matmul(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias);

// Products with the pass over memory before or after them made on the way, where this GPU was measured to be faster so
// than by matmul() and the kernel of that pass. Each returns false, and has done nothing, where it was not, where the
// library has no such product, for other dtypes than bfloat16, and where the arena's kernels are to be deterministic.
// The operands are matrices as matmul()'s; all lie on one GPU.

// h = a b + bias, y = gelu(h) of the sum before it is rounded: what tensor/ops/activations.h makes after the product.
bool matmul_gelu(const Tensor& y, const Tensor& h, const Tensor& a, const Tensor& b, const Tensor& bias);
// dh = (a b) gelu'(h) of the sum before it is rounded. The sums of dh's rows, which the pass apart would bring along in
// dbias (float32, undefined: not wanted), are left to others; their cost as a pass of its own is counted.
bool matmul_gelu_gradient(const Tensor& dh, const Tensor& a, const Tensor& b, const Tensor& h, const Tensor& dbias);
// out = a b and `sums` (M), of out's dtype, the sums of the rows of a: the gradients of a weight and its bias, of which
// a is dy^T. `a` must lie as the transpose of contiguous rows.
bool matmul_and_sums(const Tensor& out, const Tensor& sums, const Tensor& a, const Tensor& b);
}  // namespace cuda

}  // namespace tessera
