// Load, forward, backward, clip, update.
#include "bench/plain_loop.h"

#include <utility>

#include "optim/grad_norm.h"

namespace tessera::bench {

PlainLoop::PlainLoop(const Job& job, Sequences sequences)
    : optim_(job.optim), sequences_(std::move(sequences)), model_(whole_model(job, sequences_.vocab)) {
  const DataOptions d = data_options(job);
  model_->materialize(d.seed, arena_, d.dtype, d.grad_dtype);
  optimizer_ = make_optimizer(job, model_->units());
}

void PlainLoop::step() {
  const int64_t context = model_->config.context;
  const Tensor ids = Tensor::empty({optim_.batch, context}, DType::int32, arena_, Category::activations),
               targets = Tensor::empty({optim_.batch, context}, DType::int32, arena_, Category::activations);
  sequences_.load(optimizer_->steps(), 0, optim_.batch, ids.data<int32_t>(), targets.data<int32_t>());
  model_->set_step({.seed = static_cast<uint64_t>(optim_.seed), .step = optimizer_->steps(), .training = true});
  model_->clear_gradients();
  backward(model_->loss(ids, targets, 1.0 / static_cast<double>(optim_.batch * context)).mean);
  optimizer_->step(optim_.lr, clip_factor(grad_norm(model_->units()), optim_.clip));
}

}  // namespace tessera::bench
