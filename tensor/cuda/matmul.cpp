// From our matrices by rows to a product of matrices by columns.
#include "tensor/cuda/matmul.h"

#include <optional>

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
  const std::optional<Matrices> to = by_columns(out);
  if (!to || to->transposed) throw Error("[matmul] the rows of out must run on; strides are " + out.strides().str());
  Arena& arena = *out.arena();
  Tensor left, right, addend = bias;  // copies, until the product is queued
  // The library is told no alignment of the bias, and may read 16 bytes of it at a time.
  if (bias.defined() && reinterpret_cast<uintptr_t>(bias.address()) % 16 != 0) addend = bias.clone();
  // float64 is for checking: its bias is added in a pass of its own, as on the CPU.
  const bool beside = bias.defined() && out.dtype() == DType::float64;
  multiply(arena, {.m = out.dim(-1),
                   .n = out.dim(-2),
                   .k = a.dim(-1),
                   .batch = out.rank() == 3 ? out.dim(0) : 1,
                   .left = operand(b, left),
                   .right = operand(a, right),
                   .out = *to,
                   .bias = bias.defined() && !beside ? on_gpu(addend) : nullptr,
                   .operands = a.dtype(),
                   .result = out.dtype(),
                   .tf32 = a.dtype() == DType::float32 && arena.local<Tf32>().allowed});
  if (beside) add_(result, bias);
}

}  // namespace tessera::cuda
