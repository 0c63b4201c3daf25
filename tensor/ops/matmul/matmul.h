// Matmuls.
//
// On the CPU, float32 and bfloat16 use oneDNN (accumulated in float32, rounded once); bfloat16 uses Tessera's AMX
// kernel if available, float64 Tessera's blocked kernel; in leaves, all dtypes use a blocked kernel of Tessera
// (leaves.h). On a GPU all dtypes use cuBLASLt (cuda/gemm.h).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "tensor/ops/matmul/leaves.h"
#include "tensor/tensor.h"

namespace tessera {

// (..., M, K) x (..., K, N) -> (..., M, N) with equal leading dims, or (..., M, K) x (K, N). Any strides. Throws Error
// if K or the dtypes differ. Cost: 2 M N K FLOPs per matrix; on a GPU, copies of non-contiguous operands.
Tensor matmul(const Tensor& a, const Tensor& b);
// out (M, N) = a (M, K) b (K, N) for 2-D views; out has contiguous rows and may be float32 if a and b are bfloat16. On
// a GPU results may depend bitwise on whether an operand is packed or transposed.
void matmul_into(Tensor& out, const Tensor& a, const Tensor& b);

// State of a weight for its matmuls: packed copies, rebuilt after each optimizer step (Storage::version), and the shard
// of the weight that is stored here, for leaves.
struct PackedWeights {
  struct Packed {
    Tensor bytes;  // opaque, Category::workspace
    int64_t rows = 0;
    bool transposed = false;
    uint64_t version = 0;
    const std::byte* source = nullptr;
    int threads = 0;  // the layout may depend on them
  };
  bool caches = true;  // packed copies; false: none are made
  std::vector<Packed> packs = {};
  WeightShards shards = {};
};

// y = x w^T + b. x (..., K), w (N, K), b (N) or undefined -> (..., N). In leaves, a partial sum over inputs that are
// sharded over ranks has the accumulation dtype.
Tensor linear(const Tensor& x, const Tensor& w, const Tensor& b, PackedWeights* packs = nullptr);
// x (M, K), y (M, N) with contiguous rows.
void linear_into(Tensor& y, const Tensor& x, const Tensor& w, const Tensor& b, PackedWeights* packs = nullptr);
// dx = dy w: (..., N) -> (..., K); likewise if the outputs are sharded.
Tensor linear_input_grad(const Tensor& dy, const Tensor& w, PackedWeights* packs = nullptr);
// dy (M, N), dx (M, K) with contiguous rows.
void linear_input_grad_into(Tensor& dx, const Tensor& dy, const Tensor& w, PackedWeights* packs = nullptr);
// dw (N, K) = dy^T x, over all rows; overwrites dw, which may be float32 if dy is bfloat16. In leaves, rows are the
// tokens of sequences: dy (B, T, N).
void linear_weight_grad(Tensor& dw, const Tensor& dy, const Tensor& x);

namespace cpu {
// False without AVX-512: oneDNN then has no bfloat16 matmul, so Tessera computes in float32 with the same rounding.
bool has_bfloat16_matmul();
// Whether packed copies of all weights justify using twice the weights' memory: only with AMX, which is slow for some
// strides of unpacked weights. Otherwise input gradients gain as much from a temporary copy
// (docs/measurements/cpu_training.md).
bool packing_is_profitable();
// Version and instruction set, for logs: "oneDNN 2.6.3, avx512_core_bf16".
std::string matmul_library();
}  // namespace cpu

namespace cuda {
// out (M, N) = a (M, K) b (K, N) + bias (N), batched if all three have a leading dim. cuBLASLt receives packed matrices
// aligned to 16 bytes; other layouts are copied, and rows are padded to a multiple of 8 elements if the library has no
// algorithm otherwise (counted in KernelLog). Rows of out must be contiguous; out has the dtype of a and b, or float32;
// bias is undefined, or contiguous with out's dtype. bfloat16 and float32 are accumulated in float32 and rounded once.
void matmul(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias);

// Matmuls fused with the adjacent pass. They return false without side effects if fusion was not measured to be faster
// on this GPU, if the library has no such matmul, for dtypes other than bfloat16, and in deterministic mode.

// h = a b + bias, y = gelu(h) of the unrounded sum.
bool matmul_gelu(const Tensor& y, const Tensor& h, const Tensor& a, const Tensor& b, const Tensor& bias);
// dh = (a b) gelu'(h) of the unrounded sum. The caller computes the sum of dh over its rows; with a defined dbias
// (float32) the comparison includes its cost.
bool matmul_gelu_gradient(const Tensor& dh, const Tensor& a, const Tensor& b, const Tensor& h, const Tensor& dbias);
// out = a b, and `sums` (M) = the sum of each row of a. a must be the transpose of a matrix with contiguous rows. If a
// is dy^T, the results are the gradients of a weight and its bias.
bool matmul_and_sums(const Tensor& out, const Tensor& sums, const Tensor& a, const Tensor& b);
}  // namespace cuda

}  // namespace tessera
