// A run in steps that all ranks make together.
#include <fmt/format.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "app/flops.h"
#include "app/option_values.h"
#include "app/plan_machine.h"
#include "app/pretrained.h"
#include "app/saver.h"
#include "app/signals.h"
#include "app/trace_file.h"
#include "app/training.h"
#include "tensor/cpu/vectorize.h"
#include "train/check_state.h"
#include "train/trainer.h"
#include "train/usage.h"

namespace tessera {
namespace {

// True at every `every`-th step; the last step is the caller's.
bool due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

Wish wish_of_signals() {
  if (interrupted() != 0) return Wish::stop;
  return take_save_request() ? Wish::save : Wish::none;
}

// The steps of one rank. Returns the exit status; only rank 0 has an output.
int train_steps(const Run& run, Trainer& trainer, TrainOutput* output, Trace* trace) {
  const TrainOptions& o = run.options;
  Saver saver(run, trainer);
  const auto evaluate = [&] {  // false when it was stopped
    if (o.no_eval) return true;
    const auto stop = [] { return interrupted() != 0; };
    const std::optional<Validation> found =
        validation_of(run.dataset, trainer.whole_model().config.context,
                      [&](const Rows& rows) { return trainer.mean_loss(rows, stop); });
    if (!found) return false;
    saver.validated(found->loss);
    if (output) output->eval(trainer.steps_done(), *found);
    return true;
  };
  const auto stopped = [&](bool validating) {
    if (output) say_stopped(run, trainer.steps_done(), validating, *output);
    return status_of_interruption();
  };
  // Of a run that was stopped before it was made.
  if (o.resume && trainer.steps_done() > 0 && trainer.steps_done() < o.steps &&
      due(trainer.steps_done(), o.eval_every) &&
      trainer.world().max(output && !output->has_validation_of(trainer.steps_done()) ? 1 : 0) > 0 && !evaluate())
    return stopped(true);
  bool captures = true;  // as far as was said
  while (trainer.steps_done() < o.steps) {
    if (trace) trace->begin_step(trainer.steps_done() + 1);
    const StepReport report = trainer.step(wish_of_signals());
    if (trace) trace->end_step();
    if (output && captures && !trainer.step_record().given_up.empty()) {
      output->message(fmt::format("CUDA graph: off (a step could not be captured: {})",
                                  with_options(trainer.step_record().given_up)));
      captures = false;
    }
    if (output) {
      run.directory.check();
      output->step(report);
    }
    saver.poll();
    if (report.wish == Wish::stop) {
      saver.save();
      return stopped(false);
    }
    if (report.step == o.steps) break;
    if (report.wish == Wish::save) {
      saver.save();
      if (output) say_saved(run, report.step, *output);
    }
    if (due(report.step, o.eval_every) && !evaluate()) {
      saver.save();
      return stopped(true);
    }
    if (due(report.step, o.check_replicas)) check_replicas(trainer);
    if (due(report.step, o.save_every)) saver.begin();
  }
  saver.save();
  return evaluate() ? 0 : stopped(true);
}

std::optional<double> prediction_of(const Run& run, Trainer& trainer) {
  const auto machine = kept_here();
  if (!machine) return {};
  Job job = run.job;
  job.model = trainer.whole_model().config;
  job.plan.threads_per_rank = cpu::threads();
  return predicted_step(*machine, job);
}

void say_summary(const Run& run, Trainer& trainer, const RunUsage& usage, const ExpertLoad& experts,
                 TrainOutput& output) {
  output.summary({.steps = trainer.steps_done(),
                  .tokens_per_step = trainer.tokens_per_step(),
                  .flops_per_token = trainer.whole_model().training_flops(),
                  .rank_peak_flops = measured_peak_flops(run.job.optim.dtype, trainer.arena()),
                  .strategy = std::string(trainer.strategy().name()),
                  .backend = std::string(trainer.world().kind()),
                  .usage = usage,
                  .arena = trainer.arena(),
                  .graph = trainer.step_record(),
                  .no_graph = with_options(no_graph_because(run.job, run.options.trace, run.dataset.has_examples())),
                  .predicted_s = prediction_of(run, trainer),
                  .sample = sample_of_saved(run, trainer.whole_model().config),
                  .experts = experts});
}

}  // namespace

int train_in_steps(const Run& run, Communicator& world) {
  const TrainOptions& o = run.options;
  RunTrace trace(o, world);
  Trainer trainer(run.job, run.sequences, world, trace.get());
  std::vector<std::string> passed_over;
  const bool resumed = o.resume && run.directory.resume(trainer, o, run.dataset, passed_over);
  if (o.init && !resumed)
    begin_with(trainer.strategy().residents(), trainer.optimizer(),
               first_weights(open_pretrained(*o.init), trainer.whole_model().config));
  check_steps_done(run, trainer.steps_done());
  world.barrier();  // everybody has read what there is before anything is written
  std::unique_ptr<TrainOutput> output;
  if (world.rank() == 0)
    output = begin_output(run, {.model = trainer.whole_model(),
                                .steps = fmt::format("{} steps of {} tokens", o.steps, trainer.tokens_per_step()),
                                .done = trainer.steps_done(),
                                .passed_over = passed_over});
  const int status = train_steps(run, trainer, output.get(), trace.get());
  trace.stop(trainer);
  const RunUsage usage = usage_of(world, trainer.communicators(), trainer.arena());
  const ExpertLoad experts = expert_load(trainer);
  const bool traced = trace.write(run, trainer, usage);
  if (!output) return status;
  if (traced)
    output->message(fmt::format("the timeline is written; tessera report {} draws it", run.directory.path().string()));
  if (status != 0) return status;
  say_summary(run, trainer, usage, experts, *output);
  return interrupted() != 0 ? status_of_interruption() : 0;
}

}  // namespace tessera
