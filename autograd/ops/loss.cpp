// Cross-entropy, and the vocabulary's matmul before it: forward passes and vjps.
#include <cstdint>
#include <utility>

#include "autograd/fusion.h"
#include "autograd/ops.h"

namespace tessera {

Loss cross_entropy(Var logits, const Tensor& targets_anywhere, double scale) {
  const Var edge = logits.edge();
  const bool trains = grad_enabled() && logits.requires_grad();
  Tensor x = std::move(logits).take();
  const Tensor targets = targets_on_device(x, targets_anywhere, x.dim(-1));
  if (trains && x.device() == Device::cuda && x.unique() && x.is_contiguous()) {
    const CrossEntropy r = cross_entropy_in_place(x, targets, scale);  // before backward() provides its seed
    Var root = record_one("cross_entropy", tessera::scale(r.sum, scale), {edge}, [x = std::move(x)](Grads& g) mutable {
      scale_rows_(x, g.output());
      g.set(0, std::move(x));
    });
    return {std::move(root), r.loss_sum, r.count};
  }
  const CrossEntropy r = cross_entropy(x, targets);
  Var root = record_one("cross_entropy", tessera::scale(r.sum, scale), {edge},
                        [x = std::move(x), targets, lse = r.lse, scale](Grads& g) mutable {
                          const GradientScale by(scale, g.output());
                          g.set(0, cross_entropy_backward(std::move(x), targets, lse, by));
                        });
  return {std::move(root), r.loss_sum, r.count};
}

// If the logits fit in one block (`RowBlocks`), linear_by_rows() is a plain linear(), and linear_cross_entropy() a
// plain linear() and cross_entropy().
Var linear_by_rows(const Var& x, const Var& w, PackedWeights* packs, int64_t max_bytes) {
  const RowBlocks blocks = row_blocks(x.value(), w.value(), max_bytes);
  if (blocks.one()) return linear(x, w, Var(), packs);
  return record_one("linear", linear_by_rows(x.value(), w.value(), blocks, packs), {x, w},
                    [x = x.saved(), w = w.saved(), blocks, packs](Grads& g) {
                      const Tensor dy = g.output();
                      if (g.needs(0)) g.set(0, linear_input_grad_by_rows(dy, w.get(), blocks, packs));
                      if (g.needs(1))
                        g.write_grad(1, [dy, blocks, in = x.until(g.defer())](Tensor& dw) {
                          linear_weight_grad_by_rows(dw, dy, in.get(), blocks);
                        });
                    });
}

Loss linear_cross_entropy(const Var& x, const Var& w, const Tensor& targets, double scale, PackedWeights* packs,
                          int64_t max_bytes) {
  const RowBlocks blocks = row_blocks(x.value(), w.value(), max_bytes);
  if (blocks.one()) {
    Var logits = reshape(linear(x, w, Var(), packs), {blocks.rows, w.dim(0)});
    return cross_entropy(std::move(logits), targets, scale);
  }
  const Tensor rows = x.value().contiguous().flat_rows();
  const bool of_x = grad_enabled() && x.requires_grad(), of_w = grad_enabled() && w.requires_grad();
  Tensor dx = of_x ? rows.make(rows.shape()) : Tensor();
  auto dw = of_w ? fusion::precomputed_grad(w, accum_dtype(x.dtype())) : nullptr;
  const LinearCrossEntropy r = linear_cross_entropy(rows, w.value(), targets, scale, of_x ? &dx : nullptr,
                                                    of_w ? &dw->at : nullptr, blocks, packs);
  Tensor mean = r.sum;
  scale_(mean, scale);
  if (of_x) dx = dx.reshape(x.shape());
  Var root = record_one("linear_cross_entropy", std::move(mean), {x, w},
                        [dx = std::move(dx), dw = std::move(dw)](Grads& g) mutable {
                          const double seed = g.output().item<double>();
                          if (seed != 1 && dx.defined()) scale_(dx, seed);
                          if (seed != 1 && dw) scale_(dw->at, seed);
                          if (dx.defined()) g.set(0, std::move(dx));
                          if (dw) fusion::set_precomputed(g, 1, std::move(dw));
                        });
  return {std::move(root), r.loss_sum, r.count};
}

}  // namespace tessera
