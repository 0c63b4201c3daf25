// Conversion of row-major matmuls to column-major GEMMs.
#include <cstdint>
#include <string>

#include "tensor/kernels.h"
#include "tensor/ops/activations.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/matmul/cuda/gemm.h"
#include "tensor/ops/reduce.h"

namespace tessera::cuda {
namespace {

std::byte* on_gpu(const Tensor& t) {
  if (t.device() != Device::cuda)
    throw Error("[matmul] an operand, " + t.describe() + ", is on " + std::string(to_string(t.device())) +
                "; expected all on the GPU");
  return t.address();
}

bool is_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.address()) % 16 == 0; }
bool is_packed(const Tensor& t) { return t.is_contiguous() && is_aligned(t); }

// Packed row-major matrices as column-major matrices of shape (cols, rows).
Matrices row_matrices(const Tensor& t) {
  return {.data = on_gpu(t), .leading = t.dim(-1), .step = t.ndim() == 3 ? t.dim(-2) * t.dim(-1) : 0};
}

bool is_transposed(const Tensor& t) { return !t.is_contiguous() && t.transpose(-2, -1).is_contiguous(); }

// Operand t, in place if it is packed and aligned or the transpose of such a matrix, otherwise in `copy`.
Matrices operand(const Tensor& t, Tensor& copy) {
  const bool is_transpose = is_transposed(t);
  copy = is_transpose ? t.transpose(-2, -1) : t.contiguous();
  if (!is_aligned(copy)) copy = copy.clone();
  Matrices m = row_matrices(copy);
  m.transposed = is_transpose;
  return m;
}

// Keeps a GEMM's operands alive until it is queued.
struct OperandCopies {
  Tensor left, right, other;
};

GemmProblem make_gemm(const Tensor& out, const Tensor& a, const Tensor& b, OperandCopies& copies) {
  return {.m = out.dim(-1),
          .n = out.dim(-2),
          .k = a.dim(-1),
          .batch = out.ndim() == 3 ? out.dim(0) : 1,
          .left = operand(b, copies.left),
          .right = operand(a, copies.right),
          .out = row_matrices(out),
          .operands = a.dtype(),
          .result = out.dtype()};
}

// The library does not require an aligned bias but may read 16 bytes at a time.
const std::byte* bias_data(const Tensor& bias, OperandCopies& copies) {
  if (!bias.defined()) return nullptr;
  copies.other = is_aligned(bias) ? bias : bias.clone();
  return on_gpu(copies.other);
}

// For packed t.
bool can_be_aux(const Tensor& t) { return t.dim(-1) % 8 == 0; }

// Fusion requires bfloat16, whose rounding hides the deviation of the library's GELU; float32 is for comparisons.
bool may_fuse(const Tensor& out, const Tensor& a, const Tensor& b) {
  return is_packed(out) && a.dtype() == DType::bfloat16 && a.ndim() == 2 && a.dim(0) > 0 && a.dim(1) > 0 &&
         b.dim(1) > 0 && !a.arena()->local<KernelChoice>().deterministic;
}

// Returns false if the library has no algorithm.
bool multiply_packed(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias) {
  Arena& arena = *out.arena();
  OperandCopies copies;
  // float64 is for verification: its bias is added in a separate pass, as on the CPU.
  const bool separate_bias = bias.defined() && out.dtype() == DType::float64;
  GemmProblem p = make_gemm(out, a, b, copies);
  p.bias = separate_bias ? nullptr : bias_data(bias, copies);
  p.tf32 = a.dtype() == DType::float32 && arena.local<Tf32>().allowed;
  if (!has_algorithm(arena, p)) return false;
  multiply(arena, p);
  Tensor result = out;
  if (separate_bias) add_(result, bias);
  return true;
}

// Zero-pads t to (rows, cols) in the same layout; returns t if it has that size.
Tensor padded(const Tensor& t, int64_t rows, int64_t cols) {
  if (t.dim(-2) == rows && t.dim(-1) == cols) return t;
  if (is_transposed(t)) return padded(t.transpose(-2, -1), cols, rows).transpose(-2, -1);
  const int64_t m = t.dim(-2), n = t.dim(-1);
  Shape shape = t.shape();
  shape[-2] = rows;
  shape[-1] = cols;
  const Tensor wide = t.make(shape, t.dtype(), Category::workspace);
  if (n < cols) wide.narrow(-1, n, cols - n).fill(0);
  if (m < rows) wide.narrow(-2, m, rows - m).fill(0);
  wide.narrow(-2, 0, m).narrow(-1, 0, n).copy_from(t);
  return wide;
}

// Every library has an algorithm for dims that are multiples of 8.
void multiply_padded(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias) {
  const auto up = [](int64_t n) { return (n + 7) / 8 * 8; };
  const int64_t m = up(a.dim(-2)), k = up(a.dim(-1)), n = up(b.dim(-1));
  Shape shape = out.shape();
  shape[-2] = m;
  shape[-1] = n;
  const bool fits = shape == out.shape();
  const Tensor wide = fits ? out : out.make(shape, out.dtype(), Category::workspace);
  const Tensor addend = bias.defined() ? padded(bias.reshape({1, bias.numel()}), 1, n).reshape({n}) : Tensor{};
  if (!multiply_packed(wide, padded(a, m, k), padded(b, k, n), addend))
    throw Error(
        "[matmul] the library has no algorithm for " + a.describe() + " x " + b.describe() + ", even with padding",
        Status::communication);
  Tensor result = out;
  if (!fits) result.copy_from(wide.narrow(-2, 0, out.dim(-2)).narrow(-1, 0, out.dim(-1)));
  ++out.arena()->local<KernelLog>().padded_products;
}

// Runs the fused GEMM if it is faster; otherwise does nothing and returns false.
bool run_if_faster(Arena& arena, const GemmPath& fused, const GemmPath& separate) {
  if (!has_algorithm(arena, separate.problem) || !is_faster(arena, fused, separate)) return false;
  multiply(arena, fused.problem);
  return true;
}

}  // namespace

void matmul(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias) {
  if (!is_floating(a.dtype()))
    throw Error("[matmul] dtype is " + std::string(to_string(a.dtype())) + "; expected a floating-point dtype");
  if (bias.defined()) bias.check_dtype(out.dtype());
  if (out.numel() == 0) return;
  if (a.dim(-1) == 0) {
    Tensor result = out;
    result.fill(0);
    if (bias.defined()) add_(result, bias);
  } else if (!is_packed(out)) {
    if (out.strides()[-1] != 1 && out.dim(-1) > 1)
      throw Error("[matmul] expected contiguous rows of out; strides are " + out.strides().str());
    const Tensor made = out.make(out.shape(), out.dtype(), Category::workspace);
    matmul(made, a, b, bias);
    Tensor result = out;
    result.copy_from(made);
  } else if (!multiply_packed(out, a, b, bias)) {
    multiply_padded(out, a, b, bias);
  }
}

bool matmul_gelu(const Tensor& y, const Tensor& h, const Tensor& a, const Tensor& b, const Tensor& bias) {
  KernelLog::Pass& log = y.arena()->local<KernelLog>().gelu;
  if (!may_fuse(y, a, b) || !is_packed(h) || !can_be_aux(h)) return log.count(false);
  OperandCopies copies;
  const GemmProblem separate = make_gemm(h, a, b, copies);
  GemmProblem fused = separate;
  fused.out = row_matrices(y);
  fused.bias = bias_data(bias, copies);
  fused.epilogue = Epilogue::gelu;
  fused.aux = separate.out;
  const auto pass = [&] { bias_activation({h, y}, h, bias.defined() ? &bias : nullptr, Activation::gelu); };
  return log.count(run_if_faster(*y.arena(), {fused, [] {}}, {separate, pass}));
}

bool matmul_gelu_gradient(const Tensor& dh, const Tensor& a, const Tensor& b, const Tensor& h, const Tensor& dbias) {
  KernelLog::Pass& log = dh.arena()->local<KernelLog>().gelu_gradient;
  if (!may_fuse(dh, a, b) || !can_be_aux(h)) return log.count(false);
  OperandCopies copies;
  const GemmProblem separate = make_gemm(dh, a, b, copies);
  GemmProblem fused = separate;
  fused.epilogue = Epilogue::gelu_gradient;
  copies.other = is_packed(h) ? h : h.clone();
  fused.aux = row_matrices(copies.other);
  const auto sums = [&] {  // upper bound on their cost
    if (dbias.defined()) sum_rows(dbias, dh);
  };
  const auto pass = [&] { bias_activation_backward(dh, dh, h, dbias.defined() ? &dbias : nullptr, Activation::gelu); };
  return log.count(run_if_faster(*dh.arena(), {fused, sums}, {separate, pass}));
}

bool matmul_and_sums(const Tensor& out, const Tensor& sums, const Tensor& a, const Tensor& b) {
  if (!is_packed(out)) {
    Tensor result = out;
    const Tensor made = out.make(out.shape(), out.dtype(), Category::workspace);
    const bool fused = matmul_and_sums(made, sums, a, b);
    if (fused) result.copy_from(made);
    return fused;
  }
  KernelLog::Pass& log = out.arena()->local<KernelLog>().bias_sums;
  if (!may_fuse(out, a, b) || !is_packed(sums)) return log.count(false);
  OperandCopies copies;
  const GemmProblem separate = make_gemm(out, a, b, copies);
  GemmProblem fused = separate;
  fused.sums = on_gpu(sums);
  const auto pass = [&] { sum_rows(sums, a.transpose(0, 1)); };
  return log.count(run_if_faster(*out.arena(), {fused, [] {}}, {separate, pass}));
}

}  // namespace tessera::cuda
