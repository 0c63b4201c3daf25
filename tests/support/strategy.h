// Helpers that run a data-axis strategy.
#pragma once
#include <cstdint>

#include "models/decoder.h"
#include "optim/grad_norm.h"
#include "parallel/gradient_norm.h"

namespace tessera::test {

inline StrategyOptions strategy_options(DataMode mode, int zero = 0, int servers = 1) {
  if (mode == DataMode::dataparallel) return DataParallelOptions{};
  if (mode == DataMode::ps_sync) return ParameterServerOptions{servers};
  if (mode == DataMode::diloco) return DilocoOptions{};
  return zero == 0 ? StrategyOptions(DdpOptions{}) : ZeroOptions{.stage = zero};
}
inline StrategyOptions zero_options(int stage) { return strategy_options(DataMode::ddp, stage); }

// Forward and backward pass of micro-batch `index`; returns the sum of this rank's losses.
inline double run_microbatch(DataStrategy& strategy, Decoder& model, const Tensor& ids, const Tensor& targets,
                             double scale, int64_t index) {
  const Head head{
      [&](const Var& hidden) { return model.logits(hidden); },
      [&](const Var& hidden, const Tensor& wanted, double by) { return model.head_loss(hidden, wanted, by); }};
  const Root root = strategy.batches().loss(model.hidden(strategy.batches().scatter_batch(ids)), targets, scale, head);
  strategy.begin_gradients(index);
  backward(root.value, {.seed = root.seed});
  strategy.end_gradients(index);
  return root.loss_sum;
}

inline double sum_of_squares(DataStrategy& strategy) {
  OrderedSum total;
  for (const double sum : unit_sums(strategy)) total.add(sum);
  return total.total();
}

}  // namespace tessera::test
