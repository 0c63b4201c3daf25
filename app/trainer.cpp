// Steps and validation.
#include "app/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

#include "app/evaluate.h"
#include "app/plan.h"
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

Trainer::Trainer(const TrainOptions& o, Sequences sequences, Communicator& world)
    : options_(o),
      sequences_(std::move(sequences)),
      world_(world),
      data_axis_(world.split(0, world.rank(), "dp")),
      arena_(make_arena()),
      model_(gpt_config(o, sequences_.vocab)),
      strategy_(make_data_strategy(model_, *data_axis_, arena_, data_options(o))),
      schedule_{.lr = o.lr, .min_lr = o.min_lr.value_or(o.lr / 10), .warmup = o.warmup, .steps = o.steps} {
  optimizer_ = make_optimizer(o.optimizer, strategy_->shards(), optimizer_options(o));
}

Trainer::~Trainer() = default;

double Trainer::forward_backward(int64_t microbatch) {
  const int64_t context = model_.config.context;
  const Share own = strategy_->computes(options_.batch, options_.microbatches, microbatch);
  const std::vector<Share> loads = strategy_->loads(options_.batch, options_.microbatches, microbatch);
  int64_t rows = 0;
  for (const Share& share : loads) rows += share.count;
  const Shape shape{rows > 0 ? rows : own.count, context};
  Tensor ids = Tensor::meta(shape, DType::int32), targets = ids;
  if (rows > 0) {
    ids = Tensor::empty(shape, DType::int32, arena_, Category::activations);
    targets = Tensor::empty(shape, DType::int32, arena_, Category::activations);
  }
  int64_t at = 0;
  for (const Share& share : loads) {
    sequences_.load(steps_done(), share.first, share.count, ids.data<int32_t>() + at, targets.data<int32_t>() + at);
    at += share.count * context;
  }
  model_.set_step({.seed = static_cast<uint64_t>(options_.seed),
                   .step = steps_done(),
                   .first_sequence = own.first,
                   .training = true});
  const Root root = strategy_->loss(model_.logits(model_.hidden(strategy_->deal(ids))), targets,
                                    1.0 / static_cast<double>(tokens_per_step()), cross_entropy);
  strategy_->begin_gradients(microbatch);
  backward(root.value, {.seed = root.seed});
  strategy_->end_gradients(microbatch);
  return root.loss_sum;
}

StepReport Trainer::compute_gradients(bool stop) {
  strategy_->begin_step();
  double sum = 0;
  for (int64_t m = 0; m < options_.microbatches; ++m) sum += forward_backward(m);
  strategy_->finish_gradients();
  std::array<double, 2> totals{sum, stop ? 1.0 : 0.0};
  world_.sum(totals);
  StepReport r;
  r.loss = totals[0] / static_cast<double>(tokens_per_step());
  r.stop = totals[1] > 0;
  r.grad_norm = std::sqrt(sum_of_squares());
  if (!std::isfinite(r.loss) || !std::isfinite(r.grad_norm))
    throw Error(
        fmt::format(
            "step {}: the loss is {} and the gradient norm {}; expected finite numbers (a smaller --lr may help)",
            steps_done() + 1, number(r.loss), number(r.grad_norm)),
        Status::not_finite);
  r.lr = schedule_.at(steps_done());
  return r;
}

// Units in their order, whoever has them.
double Trainer::sum_of_squares() {
  double total = 0;
  for (const double sum : strategy_->unit_sums()) total += sum;
  return total;
}

void Trainer::update(const StepReport& r) {
  optimizer_->step(r.lr, clip_factor(r.grad_norm, options_.clip));
  strategy_->share_parameters();
}

StepReport Trainer::step(bool stop) {
  const auto start = std::chrono::steady_clock::now();
  StepReport r = compute_gradients(stop);
  update(r);
  r.step = steps_done();
  const double seconds = seconds_since(start);
  r.step_ms = seconds * 1e3;
  r.tokens_per_s = static_cast<double>(tokens_per_step()) / seconds;
  return r;
}

// As many sequences at once as a micro-batch has: no more memory than a step, and the same packed weights.
double Trainer::mean_loss(const TokenFile& split) {
  const int64_t at_once = options_.batch / (options_.microbatches * data_axis_->size());
  return tessera::mean_loss(model_, *data_axis_, split, at_once, arena_);
}

double flops_per_token(Gpt& model) {
  const GptConfig& c = model.config;
  const auto weights =
      static_cast<double>(model.parameter_count() - c.context * c.channels);  // positions are looked up
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
