// Steps and validation.
#include "app/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "optim/grad_norm.h"
#include "tensor/error.h"

namespace tessera {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A NaN has a sign, which nobody wants to read.
std::string number(double v) { return std::isnan(v) ? "nan" : fmt::format("{}", v); }

Recompute recompute_of(const std::string& name) {
  if (name == "gelu") return Recompute::gelu;
  if (name == "gelu+norm") return Recompute::gelu_norm;
  return name == "block" ? Recompute::block : Recompute::none;
}

}  // namespace

GptConfig gpt_config(const TrainOptions& o, int64_t tokenizer_vocab) {
  const ModelSizes s = sizes_of(o);
  if (o.vocab && *o.vocab < tokenizer_vocab)
    throw Error(fmt::format("--vocab: expected at least the tokenizer's {}, found {}", tokenizer_vocab, *o.vocab));
  return {s.layers,
          s.heads,
          s.channels,
          s.context,
          o.vocab.value_or(tokenizer_vocab),
          o.dropout,
          recompute_of(o.recompute)};
}

DType dtype_of(const TrainOptions& o) { return o.dtype == "bf16" ? DType::bfloat16 : DType::float32; }

Trainer::Trainer(const TrainOptions& o, const Dataset& dataset)
    : options_(o),
      dataset_(dataset),
      arena_(make_arena()),
      model_(gpt_config(o, dataset.tokenizer->vocab_size())),
      loader_(dataset.train, model_.config.context, o.batch, static_cast<uint64_t>(o.seed)),
      schedule_{.lr = o.lr, .min_lr = o.min_lr.value_or(o.lr / 10), .warmup = o.warmup, .steps = o.steps} {
  model_.materialize(static_cast<uint64_t>(o.seed), arena_, dtype_of(o), DType::float32);
  optimizer_ =
      make_optimizer(o.optimizer, model_.units(),
                     {.momentum = o.momentum, .beta1 = o.beta1, .beta2 = o.beta2, .weight_decay = o.weight_decay});
  const Shape shape{o.batch / o.microbatches, model_.config.context};
  inputs_ = Tensor::empty(shape, DType::int32, arena_);
  targets_ = Tensor::empty(shape, DType::int32, arena_);
}

double Trainer::forward_backward(int64_t microbatch) {
  const int64_t size = inputs_.dim(0), first = microbatch * size;
  loader_.load(steps_done(), first, size, inputs_.data<int32_t>(), targets_.data<int32_t>());
  model_.set_step(
      {.seed = static_cast<uint64_t>(options_.seed), .step = steps_done(), .first_sequence = first, .training = true});
  const Loss loss = model_.loss(inputs_, targets_, 1.0 / static_cast<double>(tokens_per_step()));
  backward(loss.mean);
  return loss.loss_sum;
}

StepReport Trainer::step() {
  const auto start = std::chrono::steady_clock::now();
  StepReport r;
  model_.clear_gradients();
  double sum = 0;
  for (int64_t m = 0; m < options_.microbatches; ++m) sum += forward_backward(m);
  model_.settle_gradients();
  r.loss = sum / static_cast<double>(tokens_per_step());
  r.grad_norm = grad_norm(model_.units());
  if (!std::isfinite(r.loss) || !std::isfinite(r.grad_norm))
    throw Error(
        fmt::format(
            "step {}: the loss is {} and the gradient norm {}; expected finite numbers (a smaller --lr may help)",
            steps_done() + 1, number(r.loss), number(r.grad_norm)),
        Status::not_finite);
  r.lr = schedule_.at(steps_done());
  optimizer_->step(r.lr, clip_factor(r.grad_norm, options_.clip));
  r.step = steps_done();
  const double seconds = seconds_since(start);
  r.step_ms = seconds * 1e3;
  r.tokens_per_s = static_cast<double>(tokens_per_step()) / seconds;
  return r;
}

Trainer::Validation Trainer::validate() {
  const NoGrad no_grad;
  model_.set_step({});
  // As many sequences at once as a micro-batch has: no more memory than a step, and the same packed weights.
  const int64_t context = model_.config.context, at_once = inputs_.dim(0);
  const Windows windows(dataset_.val, context);
  double sum = 0;
  for (int64_t first = 0; first < windows.count(); first += at_once) {
    const Shape shape{std::min(at_once, windows.count() - first), context};
    const Tensor ids = Tensor::empty(shape, DType::int32, arena_), targets = Tensor::empty(shape, DType::int32, arena_);
    windows.load(first, shape[0], ids.data<int32_t>(), targets.data<int32_t>());
    sum += model_.loss(ids, targets, 1).loss_sum;
  }
  const double loss = sum / static_cast<double>(windows.targets());
  if (!std::isfinite(loss))
    throw Error(fmt::format("step {}: the validation loss is {}; expected a finite number", steps_done(), loss),
                Status::not_finite);
  return {loss, dataset_.bits_per_byte(loss)};
}

double Trainer::flops_per_token() {
  const GptConfig& c = model_.config;
  const auto weights =
      static_cast<double>(model_.parameter_count() - c.context * c.channels);  // positions are looked up
  return 6 * weights + 12 * static_cast<double>(c.layers * c.channels * c.context);
}

double measured_peak_flops(DType dtype, const ArenaPtr& arena) {
  constexpr int64_t n = 1024;
  Tensor a = Tensor::empty({n, n}, dtype, arena), b = Tensor::empty({n, n}, dtype, arena);
  a.fill(0.5);
  b.fill(0.25);
  double best = 0;
  for (int round = 0; round < 6; ++round) {
    const auto start = std::chrono::steady_clock::now();
    matmul(a, b);
    best = std::max(best, 2.0 * n * n * n / seconds_since(start));
  }
  return best;
}

}  // namespace tessera
