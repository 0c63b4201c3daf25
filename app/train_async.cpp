// An asynchronous run: workers that push when they are ready, servers that apply at once.
//
// Each worker makes --steps steps of batch / ranks sequences, so the run sees as many sequences as a synchronous one,
// in `ranks` times as many updates. What is shown as a step is as many pushes as there are workers. To save, and to
// stop, workers wait until all have made as many steps.
#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "app/async_run.h"
#include "app/device.h"
#include "app/evaluate.h"
#include "app/flops.h"
#include "app/plan.h"
#include "app/signals.h"
#include "app/trainer.h"

namespace tessera {

AsyncRun::AsyncRun(const Run& run, Communicator& world)
    : run_(run),
      o_(run.options),
      world_(world),
      axis_(world.split(0, world.rank(), "dp")),
      arena_(rank_arena(o_.device, world_)),
      model_(gpt_config(o_, run.sequences.vocab)),
      schedule_{.lr = o_.lr, .min_lr = o_.min_lr.value_or(o_.lr / 10), .warmup = o_.warmup, .steps = o_.steps},
      server_(model_, *axis_, arena_, data_options(o_), async_options()) {}

AsyncOptions AsyncRun::async_options() {
  const int ranks = axis_->size();
  return {.steps = o_.steps,
          .staleness = o_.staleness,
          .clip = o_.clip,
          .optimizer =
              [this](const std::vector<FlatUnit>& units) {
                return make_optimizer(o_.optimizer, units, optimizer_options(o_));
              },
          .lr = [this, ranks](int64_t applied) { return schedule_.at(applied / ranks); },
          .record = o_.record.value_or(""),
          .replay = o_.replay.value_or("")};
}

// The mean loss of this worker's sequences of a step, and its gradient.
double AsyncRun::worker_step(int worker, int64_t step) {
  const int64_t size = o_.batch / (axis_->size() * o_.microbatches), context = model_.config.context;
  const int64_t tokens = size * o_.microbatches * context;
  model_.clear_gradients();
  double sum = 0;
  for (int64_t m = 0; m < o_.microbatches; ++m) {
    const int64_t first = (worker * o_.microbatches + m) * size;
    const ArenaPtr host = arena_->host();
    const Tensor ids = Tensor::empty({size, context}, DType::int32, host),
                 targets = Tensor::empty({size, context}, DType::int32, host);
    run_.sequences.load(step, first, size, ids.data<int32_t>(), targets.data<int32_t>());
    model_.set_step({.seed = static_cast<uint64_t>(o_.seed), .step = step, .first_sequence = first, .training = true});
    const Loss loss = model_.loss(ids.to(arena_), targets.to(arena_), 1.0 / static_cast<double>(tokens));
    backward(loss.mean);
    sum += loss.loss_sum;
  }
  model_.settle_gradients();
  return sum / static_cast<double>(tokens);
}

void AsyncRun::show(const AppliedPush& push) {
  losses_ += push.loss;
  if (++pushes_ < axis_->size()) return;
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - last_).count();
  last_ = now;
  StepReport report;
  report.step = ++shown_;
  report.loss = losses_ / static_cast<double>(pushes_);
  report.lr = push.lr;
  report.grad_norm = push.grad_norm;
  report.step_ms = seconds * 1e3;
  report.tokens_per_s = static_cast<double>(o_.batch * model_.config.context) / seconds;
  output_->step(report);
  losses_ = 0;
  pushes_ = 0;
}

void AsyncRun::begin(const std::vector<std::string>& passed_over) {
  if (world_.rank() > 0) return;
  const std::string steps =
      fmt::format("{} asynchronous steps of {} tokens", o_.steps, o_.batch * model_.config.context);
  output_ = begin_output(run_, {.model = model_, .steps = steps, .done = step_, .passed_over = passed_over});
  if (!o_.no_eval)
    output_->message(
        "it is validated at its end only: but for when it saves, workers and servers are at no common step");
}

// False when it was stopped before or at its end.
bool AsyncRun::train() {
  const AsyncServer::Hooks hooks{.step = [&](int worker, int64_t clock) { return worker_step(worker, clock); },
                                 .on_push = [&](const AppliedPush& push) { show(push); },
                                 .wish = [] { return interrupted() != 0; }};
  while (!server_.complete()) {
    const bool meet = o_.save_every > 0 && !o_.no_save;
    const int64_t until = meet ? (step_ / o_.save_every + 1) * o_.save_every : o_.steps;
    server_.run(std::min(until, o_.steps), hooks);
    step_ = server_.steps();
    const bool stopped = world_.max(interrupted()) > 0;
    if (!o_.no_save) save();
    if (stopped) return false;
  }
  return true;
}

// All ranks call it; rank 0 writes it down.
void AsyncRun::validate() {
  model_.set_step({});
  const auto forward = [&](const Tensor& ids, const Tensor& targets) { return model_.loss(ids, targets, 1).loss_sum; };
  const double loss = mean_loss({.forward = forward,
                                 .context = model_.config.context,
                                 .at_once = o_.batch / (o_.microbatches * axis_->size()),
                                 .turn = axis_->rank(),
                                 .turns = axis_->size(),
                                 .arena = arena_},
                                *axis_, run_.dataset.val);
  if (output_) output_->eval(step_, {loss, run_.dataset.bits_per_byte(loss)});
}

void AsyncRun::finish(const AsyncSummary& summary) {
  if (!o_.no_eval) validate();
  const RunUsage usage = usage_of(world_, {&world_, axis_.get()}, arena_);
  if (!output_) return;
  output_->message(
      fmt::format("{} updates; a worker was at most {} steps ahead of the slowest, and a gradient at most {} "
                  "updates old",
                  summary.applied, summary.most_ahead, summary.most_behind));
  output_->summary({.steps = step_,
                    .tokens_per_step = o_.batch * model_.config.context,
                    .flops_per_token = flops_per_token(model_),
                    .strategy = "ps-async",
                    .backend = std::string(world_.kind()),
                    .usage = usage,
                    .arena = arena_,
                    .sample = sample_of_saved(run_, model_.config)});
}

int AsyncRun::execute() {
  std::vector<std::string> passed_over;
  if (o_.resume) resume(passed_over);
  check_steps_done(run_, step_);
  world_.barrier();  // everybody has read what there is before anything is written
  begin(passed_over);
  const bool ended = train();
  const AsyncSummary summary = server_.finish();
  if (ended) {
    finish(summary);
    return 0;
  }
  if (output_) say_stopped(run_, step_, *output_);
  return 128 + (interrupted() != 0 ? interrupted() : SIGTERM);
}

int train_asynchronously(const Run& run, Communicator& world) { return AsyncRun(run, world).execute(); }

}  // namespace tessera
