// Blocks of rows, one after another.
#include "tensor/ops/linear_cross_entropy.h"

#include <string>
#include <utility>

#include "tensor/cpu/stands_for.h"
#include "tensor/ops/cross_entropy/cross_entropy.h"
#include "tensor/ops/elementwise.h"

namespace tessera {
namespace {

constexpr int64_t kLeastRows = 32;  // of a block: with fewer, products are bound by reading the weight
// Of a gradient of w that is made fresh before it is added: a part of the cache that the cores share.
constexpr int64_t kFreshBytes = int64_t{4} << 20;

// dw = or += dy^T x of one block.
void weight_grad_of_block(Tensor& dw, const Tensor& dy, const Tensor& x, bool first) {
  if (first) return linear_weight_grad(dw, dy, x);
  const int64_t entries = dw.dim(0), row = dw.dim(1) * size_of(dw.dtype());
  const int64_t most = std::clamp<int64_t>(kFreshBytes / std::max<int64_t>(row, 1), 1, entries);
  const Tensor room = dw.make({most, dw.dim(1)}, dw.dtype(), Category::workspace);
  for (int64_t at = 0; at < entries; at += most) {
    const int64_t n = std::min(most, entries - at);
    Tensor fresh = room.narrow(0, 0, n), total = dw.narrow(0, at, n);
    matmul_into(fresh, dy.narrow(1, at, n).transpose(0, 1), x);
    add_(total, fresh);
  }
}

// A block's part of loss and gradients; `total` goes on from the blocks before.
void take_block(LinearCrossEntropy& total, const Tensor& x, const Tensor& w, const Tensor& targets, double scale,
                Tensor* dx, Tensor* dw, bool first, WeightPacks* packs) {
  Tensor logits = linear(x, w, {}, packs);
  const CrossEntropy r = cross_entropy_after(total.loss_sum, logits, targets);
  total.loss_sum = r.loss_sum;
  total.count += r.count;
  if (!dx && !dw) return;
  const Tensor gradient = cross_entropy_backward(std::move(logits), targets, r.lse, scale);
  if (dx) linear_input_grad_into(*dx, gradient, w, packs);
  if (dw) weight_grad_of_block(*dw, gradient, x, first);
}

}  // namespace

RowBlocks row_blocks(const Tensor& x, const Tensor& w, int64_t most_bytes) {
  const int64_t rows = x.numel() / std::max<int64_t>(x.dim(-1), 1);
  const int64_t row_bytes = std::max<int64_t>(w.dim(0) * size_of(x.dtype()), 1);
  const int64_t most = std::max(kLeastRows, most_bytes / row_bytes);
  const bool on_gpu = x.device() == Device::cuda || stands_for_gpu(x);
  if (rows <= most || on_gpu) return {rows, std::max<int64_t>(rows, 1)};
  const int64_t least = (rows + most - 1) / most;
  for (int64_t blocks = least; blocks < 2 * least; ++blocks)
    if (rows % blocks == 0) return {rows, rows / blocks};
  return {rows, (rows + least - 1) / least};
}

LinearCrossEntropy linear_cross_entropy(const Tensor& x_any, const Tensor& w, const Tensor& targets_any, double scale,
                                        Tensor* dx, Tensor* dw, const RowBlocks& blocks, WeightPacks* packs) {
  const Tensor x = x_any.contiguous(), targets = targets_any.contiguous();
  if (x.rank() != 2 || w.rank() != 2 || targets.rank() != 1 || targets.dim(0) != x.dim(0) ||
      targets.dtype() != DType::int32)
    throw Error("[linear_cross_entropy] x is " + x.describe() + ", w is " + w.describe() + ", targets are " +
                targets.describe() + "; expected (N, C), (V, C) and int32 (N)");
  check_targets(targets, w.dim(0));
  LinearCrossEntropy out;
  blocks.for_each([&](int64_t at, int64_t n) {
    Tensor dx_here = dx ? dx->narrow(0, at, n) : Tensor();
    take_block(out, x.narrow(0, at, n), w, targets.narrow(0, at, n), scale, dx ? &dx_here : nullptr, dw, at == 0,
               packs);
  });
  out.sum = x.make({}, DType::float64);
  *out.sum.data<double>() = out.loss_sum;
  return out;
}

Tensor linear_by_rows(const Tensor& x, const Tensor& w, const RowBlocks& blocks, WeightPacks* packs) {
  if (blocks.one()) return linear(x, w, {}, packs);
  const Tensor rows = x.contiguous().flat_rows();
  const Tensor y = x.make({rows.dim(0), w.dim(0)});
  blocks.for_each([&](int64_t at, int64_t n) {
    Tensor here = y.narrow(0, at, n);
    linear_into(here, rows.narrow(0, at, n), w, {}, packs);
  });
  return y.reshape(x.shape().with_last(w.dim(0)));
}

Tensor linear_input_grad_by_rows(const Tensor& dy, const Tensor& w, const RowBlocks& blocks, WeightPacks* packs) {
  if (blocks.one()) return linear_input_grad(dy, w, packs);
  const Tensor rows = dy.contiguous().flat_rows();
  const Tensor dx = dy.make({rows.dim(0), w.dim(1)});
  blocks.for_each([&](int64_t at, int64_t n) {
    Tensor here = dx.narrow(0, at, n);
    linear_input_grad_into(here, rows.narrow(0, at, n), w, packs);
  });
  return dx.reshape(dy.shape().with_last(w.dim(1)));
}

void linear_weight_grad_by_rows(Tensor& dw, const Tensor& dy_any, const Tensor& x_any, const RowBlocks& blocks) {
  if (blocks.one()) return linear_weight_grad(dw, dy_any, x_any);
  const Tensor dy = dy_any.contiguous().flat_rows(), x = x_any.contiguous().flat_rows();
  const DType wide = wide_of(dy.dtype());
  // Sums of blocks are rounded once.
  Tensor total = dw.dtype() == wide ? dw : dw.make(dw.shape(), wide, Category::workspace);
  blocks.for_each(
      [&](int64_t at, int64_t n) { weight_grad_of_block(total, dy.narrow(0, at, n), x.narrow(0, at, n), at == 0); });
  if (dw.dtype() != wide) dw.copy_from(total);
}

}  // namespace tessera
