// From our matrices by rows to a product of matrices by columns.
#include "tensor/cuda/matmul.h"

#include <optional>
#include <string>

#include "tensor/cuda/bias_gelu.h"
#include "tensor/cuda/kernel_choice.h"
#include "tensor/cuda/reduce.h"
#include "tensor/ops/elementwise.h"

namespace tessera::cuda {
namespace {

std::byte* on_gpu(const Tensor& t) {
  if (t.device() != Device::cuda)
    throw Error("[matmul] an operand, " + t.describe() + ", is on " + std::string(name_of(t.device())) +
                "; expected all on the GPU");
  return t.address();
}

// The matrices of t as a library sees them: by columns they are (cols, rows), unless the rows themselves run on.
// Nothing where neither dim runs on, or where lines overlap.
std::optional<Matrices> by_columns(const Tensor& t) {
  const int64_t rows = t.dim(-2), cols = t.dim(-1), down = t.strides()[-2], across = t.strides()[-1];
  const int64_t step = t.rank() == 3 ? t.strides()[0] : 0;
  if ((across == 1 || cols == 1) && (rows == 1 || down >= cols))
    return Matrices{.data = on_gpu(t), .leading = rows == 1 ? cols : down, .step = step};
  if ((down == 1 || rows == 1) && (cols == 1 || across >= rows))
    return Matrices{.data = on_gpu(t), .leading = cols == 1 ? rows : across, .step = step, .transposed = true};
  return std::nullopt;
}

// `copy` keeps the elements where t itself cannot be read.
Matrices operand(const Tensor& t, Tensor& copy) {
  if (const std::optional<Matrices> found = by_columns(t)) return *found;
  copy = t.contiguous();
  return *by_columns(copy);
}

// What the library is asked for when out = a b.
Product product_of(const Tensor& out, const Matrices& to, const Matrices& a, const Matrices& b, int64_t k) {
  return {.m = out.dim(-1),
          .n = out.dim(-2),
          .k = k,
          .batch = out.rank() == 3 ? out.dim(0) : 1,
          .left = b,
          .right = a,
          .out = to,
          .operands = out.dtype(),
          .result = out.dtype()};
}

Matrices rows_of(const Tensor& out) {
  const std::optional<Matrices> to = by_columns(out);
  if (!to || to->transposed) throw Error("[matmul] the rows of out must run on; strides are " + out.strides().str());
  return *to;
}

bool is_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.address()) % 16 == 0; }

// Whether a product of these may be made with what comes around it. Only bfloat16 hides that the library's GELU is
// its own; float32 is for comparing.
bool may_fuse(const Tensor& a, const Tensor& b) {
  return a.dtype() == DType::bfloat16 && a.rank() == 2 && a.dim(0) > 0 && a.dim(1) > 0 && b.dim(1) > 0 &&
         by_columns(a) && by_columns(b) && !a.arena()->local<KernelChoice>().deterministic;
}

// A product that has `aux`: rows that run on, a multiple of 8 elements long, at a multiple of 16 bytes.
bool can_be_aux(const Tensor& t) { return t.is_contiguous() && t.dim(-1) % 8 == 0 && is_aligned(t); }

// Takes the faster way, or says that it is not `fused`.
bool takes(Arena& arena, const Way& fused, const Way& apart) {
  if (!is_faster(arena, fused, apart)) return false;
  multiply(arena, fused.product);
  fused.rest();
  return true;
}

}  // namespace

void matmul(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias) {
  if (!is_floating(a.dtype()))
    throw Error("[matmul] dtype is " + std::string(name_of(a.dtype())) + "; expected a floating dtype");
  if (bias.defined()) bias.check_dtype(out.dtype());
  if (out.numel() == 0) return;
  Tensor result = out;
  if (a.dim(-1) == 0) {
    result.fill(0);
    if (bias.defined()) add_(result, bias);
    return;
  }
  Arena& arena = *out.arena();
  Tensor left, right, addend = bias;  // copies, until the product is queued
  // The library is told no alignment of the bias, and may read 16 bytes of it at a time.
  if (bias.defined() && !is_aligned(bias)) addend = bias.clone();
  // float64 is for checking: its bias is added in a pass of its own, as on the CPU.
  const bool beside = bias.defined() && out.dtype() == DType::float64;
  Product p = product_of(out, rows_of(out), operand(a, right), operand(b, left), a.dim(-1));
  p.bias = bias.defined() && !beside ? on_gpu(addend) : nullptr;
  p.operands = a.dtype();
  p.tf32 = a.dtype() == DType::float32 && arena.local<Tf32>().allowed;
  multiply(arena, p);
  if (beside) add_(result, bias);
}

bool matmul_gelu(const Tensor& y, const Tensor& h, const Tensor& a, const Tensor& b, const Tensor& bias) {
  if (!may_fuse(a, b) || !can_be_aux(h) || (bias.defined() && !is_aligned(bias))) return false;
  Product apart = product_of(h, rows_of(h), *by_columns(a), *by_columns(b), a.dim(1));
  Product fused = product_of(y, rows_of(y), apart.right, apart.left, a.dim(1));
  fused.bias = bias.defined() ? on_gpu(bias) : nullptr;
  fused.epilogue = Epilogue::gelu;
  fused.aux = apart.out;
  const auto pass = [&] { bias_gelu({h, y}, h, bias.defined() ? &bias : nullptr); };
  return takes(*y.arena(), {fused, [] {}}, {apart, pass});
}

bool matmul_gelu_gradient(const Tensor& dh, const Tensor& a, const Tensor& b, const Tensor& h, const Tensor& dbias) {
  if (!may_fuse(a, b) || !can_be_aux(h)) return false;
  const Product apart = product_of(dh, rows_of(dh), *by_columns(a), *by_columns(b), a.dim(1));
  Product fused = apart;
  fused.epilogue = Epilogue::gelu_gradient;
  fused.aux = rows_of(h);
  const auto sums = [&] {
    if (dbias.defined()) sum_rows(dbias, dh);
  };
  const auto pass = [&] { bias_gelu_backward(dh, dh, h, dbias.defined() ? &dbias : nullptr); };
  return takes(*dh.arena(), {fused, sums}, {apart, pass});
}

bool matmul_and_sums(const Tensor& out, const Tensor& sums, const Tensor& a, const Tensor& b) {
  if (!may_fuse(a, b) || !is_aligned(sums)) return false;
  Product apart = product_of(out, rows_of(out), *by_columns(a), *by_columns(b), a.dim(1));
  apart.operands = a.dtype();
  Product fused = apart;
  fused.sums = on_gpu(sums);
  const auto pass = [&] { sum_rows(sums, a.transpose(0, 1)); };
  return takes(*out.arena(), {fused, [] {}}, {apart, pass});
}

}  // namespace tessera::cuda
