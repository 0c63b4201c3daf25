// An asynchronous run: workers that push when they are ready, servers that apply at once.
//
// What is shown as a step is as many pushes as there are workers. To save, and to stop, workers wait until all have
// made as many steps.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "app/async_run.h"
#include "app/flops.h"
#include "app/option_values.h"
#include "app/pretrained.h"
#include "app/signals.h"
#include "train/step_graph.h"

namespace tessera {

AsyncRun::AsyncRun(const Run& run, Communicator& world)
    : run_(run), o_(run.options), world_(world), trainer_(run.job, run.sequences, world) {}

void AsyncRun::show(const AppliedPush& push) {
  losses_ += push.loss;
  if (++pushes_ < trainer_.axis().size()) return;
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - last_).count();
  last_ = now;
  StepReport report;
  report.step = ++shown_;
  report.loss = losses_ / static_cast<double>(pushes_);
  report.lr = push.lr;
  report.grad_norm = push.grad_norm;
  run_.directory.check();
  set_time(report, seconds, trainer_.tokens_per_step());
  output_->step(report);
  losses_ = 0;
  pushes_ = 0;
}

void AsyncRun::begin(const std::vector<std::string>& passed_over) {
  if (world_.rank() > 0) return;
  const std::string steps = fmt::format("{} asynchronous steps of {} tokens", o_.steps, trainer_.tokens_per_step());
  output_ = begin_output(run_, {.model = trainer_.model(), .steps = steps, .done = step_, .passed_over = passed_over});
  if (!o_.no_eval)
    output_->message(
        "the run is validated at its end only: workers and servers have no common step, except when it saves");
}

// False when it was stopped before or at its end.
bool AsyncRun::train() {
  const AsyncServer::Hooks hooks{.step = [&](int worker, int64_t clock) { return trainer_.worker_step(worker, clock); },
                                 .on_push = [&](const AppliedPush& push) { show(push); },
                                 .wish = [&] { return interrupted() != 0 || (!o_.no_save && take_save_request()); }};
  AsyncServer& server = trainer_.server();
  while (!server.complete()) {
    const bool meet = o_.save_every > 0 && !o_.no_save;
    const int64_t until = meet ? (step_ / o_.save_every + 1) * o_.save_every : o_.steps;
    server.run(std::min(until, o_.steps), hooks);
    step_ = server.steps();
    const bool stopped = world_.max(interrupted()) > 0;
    if (!o_.no_save) save();
    if (stopped) return false;
    if (output_ && step_ < std::min(until, o_.steps)) say_saved(run_, step_, *output_);
  }
  return true;
}

// All ranks call it; rank 0 writes it down. False when it was stopped.
bool AsyncRun::validate() {
  const auto found = validation_of(run_.dataset, trainer_.model().config.context, [&](const Rows& rows) {
    return trainer_.mean_loss(rows, [] { return interrupted() != 0; });
  });
  if (found && output_) output_->eval(step_, *found);
  return found.has_value();
}

void AsyncRun::finish(const AsyncSummary& summary) {
  const RunUsage usage = usage_of(world_, {&world_, &trainer_.axis()}, trainer_.arena());
  if (!output_) return;
  output_->message(
      fmt::format("{} updates; a worker was at most {} steps ahead of the slowest, and a gradient at most {} "
                  "updates old",
                  summary.applied, summary.most_ahead, summary.most_behind));
  TrainOutput::Facts facts;
  facts.steps = step_;
  facts.tokens_per_step = trainer_.tokens_per_step();
  facts.flops_per_token = trainer_.model().training_flops();
  facts.rank_peak_flops = measured_peak_flops(run_.job.optim.dtype, trainer_.arena());
  facts.strategy = "ps-async";
  facts.backend = world_.kind();
  facts.usage = usage;
  facts.arena = trainer_.arena();
  facts.no_graph = with_options(no_graph_because(run_.job, o_.trace));
  facts.sample = sample_of_saved(run_, trainer_.model().config);
  output_->summary(facts);
}

int AsyncRun::execute() {
  std::vector<std::string> passed_over;
  const bool resumed = o_.resume && resume(passed_over);
  if (o_.init && !resumed) trainer_.begin_with(open_pretrained(*o_.init).tensors);
  check_steps_done(run_, step_);
  world_.barrier();  // everybody has read what there is before anything is written
  begin(passed_over);
  const bool ended = train();
  const AsyncSummary summary = trainer_.server().finish();
  const bool validated = !ended || o_.no_eval || validate();
  if (ended && validated) {
    finish(summary);
    return output_ && interrupted() != 0 ? status_of_interruption() : 0;
  }
  if (output_) say_stopped(run_, step_, ended, *output_);
  return status_of_interruption();
}

int train_asynchronously(const Run& run, Communicator& world) { return AsyncRun(run, world).execute(); }

}  // namespace tessera
