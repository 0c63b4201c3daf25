// From our matrices by rows to a product of matrices by columns.
#include "tensor/ops/matmul/matmul.h"

#include <optional>
#include <string>

#include "tensor/kernels.h"
#include "tensor/ops/bias_gelu.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/matmul/cuda/product.h"
#include "tensor/ops/reduce.h"

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

// Queues out = a b + bias, unless the library has no algorithm for it.
bool multiply_as_they_lie(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias) {
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
  if (!has_algorithm(arena, p)) return false;
  multiply(arena, p);
  Tensor result = out;
  if (beside) add_(result, bias);
  return true;
}

// The same elements in (rows, cols), zeros around them.
Tensor padded(const Tensor& t, int64_t rows, int64_t cols) {
  Shape shape = t.shape();
  shape[-2] = rows;
  shape[-1] = cols;
  Tensor wide = t.make(shape, t.dtype(), Category::workspace);
  wide.fill(0);
  wide.narrow(-2, 0, t.dim(-2)).narrow(-1, 0, t.dim(-1)).copy_from(t);
  return wide;
}

// Through copies whose rows are a multiple of 8 elements long, for which every library has an algorithm.
void multiply_padded(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias) {
  const auto up = [](int64_t n) { return (n + 7) / 8 * 8; };
  const int64_t k = up(a.dim(-1)), n = up(b.dim(-1));
  Shape shape = out.shape();
  shape[-1] = n;
  const Tensor wide = out.make(shape, out.dtype(), Category::workspace);
  const Tensor addend = bias.defined() ? padded(bias.reshape({1, bias.numel()}), 1, n).reshape({n}) : Tensor{};
  if (!multiply_as_they_lie(wide, padded(a, a.dim(-2), k), padded(b, k, n), addend))
    throw Error("[matmul] the library has no algorithm for " + a.describe() + " x " + b.describe() + ", padded neither",
                Status::communication);
  Tensor result = out;
  result.copy_from(wide.narrow(-1, 0, out.dim(-1)));
  ++out.arena()->local<KernelLog>().padded_products;
}

// Takes the faster way, or says that it is not `fused`.
bool takes(Arena& arena, const Way& fused, const Way& apart) {
  if (!has_algorithm(arena, apart.product) || !is_faster(arena, fused, apart)) return false;
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
  if (a.dim(-1) == 0) {
    Tensor result = out;
    result.fill(0);
    if (bias.defined()) add_(result, bias);
  } else if (!multiply_as_they_lie(out, a, b, bias)) {
    multiply_padded(out, a, b, bias);
  }
}

bool matmul_gelu(const Tensor& y, const Tensor& h, const Tensor& a, const Tensor& b, const Tensor& bias) {
  KernelLog::Pass& log = y.arena()->local<KernelLog>().gelu;
  if (!may_fuse(a, b) || !can_be_aux(h) || (bias.defined() && !is_aligned(bias))) return log.count(false);
  Product apart = product_of(h, rows_of(h), *by_columns(a), *by_columns(b), a.dim(1));
  Product fused = product_of(y, rows_of(y), apart.right, apart.left, a.dim(1));
  fused.bias = bias.defined() ? on_gpu(bias) : nullptr;
  fused.epilogue = Epilogue::gelu;
  fused.aux = apart.out;
  const auto pass = [&] { bias_gelu({h, y}, h, bias.defined() ? &bias : nullptr); };
  return log.count(takes(*y.arena(), {fused, [] {}}, {apart, pass}));
}

bool matmul_gelu_gradient(const Tensor& dh, const Tensor& a, const Tensor& b, const Tensor& h, const Tensor& dbias) {
  KernelLog::Pass& log = dh.arena()->local<KernelLog>().gelu_gradient;
  if (!may_fuse(a, b) || !can_be_aux(h)) return log.count(false);
  const Product apart = product_of(dh, rows_of(dh), *by_columns(a), *by_columns(b), a.dim(1));
  Product fused = apart;
  fused.epilogue = Epilogue::gelu_gradient;
  fused.aux = rows_of(h);
  const auto sums = [&] {
    if (dbias.defined()) sum_rows(dbias, dh);
  };
  const auto pass = [&] { bias_gelu_backward(dh, dh, h, dbias.defined() ? &dbias : nullptr); };
  return log.count(takes(*dh.arena(), {fused, sums}, {apart, pass}));
}

bool matmul_and_sums(const Tensor& out, const Tensor& sums, const Tensor& a, const Tensor& b) {
  KernelLog::Pass& log = out.arena()->local<KernelLog>().bias_sums;
  if (!may_fuse(a, b) || !is_aligned(sums)) return log.count(false);
  Product apart = product_of(out, rows_of(out), *by_columns(a), *by_columns(b), a.dim(1));
  apart.operands = a.dtype();
  Product fused = apart;
  fused.sums = on_gpu(sums);
  const auto pass = [&] { sum_rows(sums, a.transpose(0, 1)); };
  return log.count(takes(*out.arena(), {fused, [] {}}, {apart, pass}));
}

}  // namespace tessera::cuda
