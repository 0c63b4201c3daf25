// The head of a language model and its loss. Where the logits are small they are a product and a loss like any other.
#include <utility>

#include "autograd/ops.h"
#include "tensor/ops/linear_cross_entropy.h"

namespace tessera {

Var linear_by_rows(const Var& x, const Var& w, WeightPacks* packs, int64_t most_bytes) {
  const RowBlocks blocks = row_blocks(x.value(), w.value(), most_bytes);
  if (blocks.one()) return linear(x, w, Var(), packs);
  return record_one("linear", linear_by_rows(x.value(), w.value(), blocks, packs), {x, w},
                    [x = x.saved(), w = w.saved(), blocks, packs](Grads& g) {
                      const Tensor dy = g.output();
                      if (g.needs(0)) g.give(0, linear_input_grad_by_rows(dy, w.get(), blocks, packs));
                      if (g.needs(1))
                        g.give_into(1, [dy, blocks, in = x.until(g.defer())](Tensor& dw) {
                          linear_weight_grad_by_rows(dw, dy, in.get(), blocks);
                        });
                    });
}

Loss linear_cross_entropy(const Var& x, const Var& w, const Tensor& targets, double scale, WeightPacks* packs,
                          int64_t most_bytes) {
  const RowBlocks blocks = row_blocks(x.value(), w.value(), most_bytes);
  if (blocks.one()) {
    // Nobody else holds the logits then, so that the loss may write over them.
    Var logits = reshape(linear(x, w, Var(), packs), {blocks.rows, w.dim(0)});
    return cross_entropy(std::move(logits), targets, scale);
  }
  const Tensor rows = x.value().contiguous().flat_rows();
  const bool of_x = grad_enabled() && x.requires_grad(), of_w = grad_enabled() && w.requires_grad();
  Tensor dx = of_x ? rows.make(rows.shape()) : Tensor();
  auto dw = of_w ? w.early_grad(wide_of(x.dtype())) : nullptr;
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
                          if (dx.defined()) g.give(0, std::move(dx));
                          if (dw) g.give_early(1, std::move(dw));
                        });
  return {std::move(root), r.loss_sum, r.count};
}

}  // namespace tessera
