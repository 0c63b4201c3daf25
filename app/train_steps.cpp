// A run in steps that all ranks make together.
#include <fmt/format.h>

#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "app/flops.h"
#include "app/option_values.h"
#include "app/saver.h"
#include "app/signals.h"
#include "app/trace_file.h"
#include "app/training.h"
#include "train/check_state.h"
#include "train/trainer.h"
#include "train/usage.h"

namespace tessera {
namespace {

// True at every `every`-th step; the last step is the caller's.
bool due(int64_t step, int64_t every) { return every > 0 && step % every == 0; }

// The steps of one rank. Returns the exit status; only rank 0 has an output.
int train_steps(const Run& run, Trainer& trainer, TrainOutput* output, Trace* trace) {
  const TrainOptions& o = run.options;
  Saver saver(run, trainer);
  const auto evaluate = [&] {
    if (o.no_eval) return;
    const double loss = trainer.mean_loss(run.dataset.val);
    saver.validated(loss);
    if (output) output->eval(trainer.steps_done(), {loss, run.dataset.bits_per_byte(loss)});
  };
  bool captures = true;  // as far as was said
  while (trainer.steps_done() < o.steps) {
    if (trace) trace->begin_step(trainer.steps_done() + 1);
    const StepReport report = trainer.step(interrupted() != 0);
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
    if (report.stop) {
      saver.save();
      if (output) say_stopped(run, report.step, *output);
      return 128 + (interrupted() != 0 ? interrupted() : SIGTERM);
    }
    if (report.step == o.steps) break;
    if (due(report.step, o.eval_every)) evaluate();
    if (due(report.step, o.check_replicas)) check_replicas(trainer);
    if (due(report.step, o.save_every)) saver.begin();
  }
  saver.save();
  evaluate();
  return 0;
}

void say_summary(const Run& run, Trainer& trainer, const RunUsage& usage, TrainOutput& output) {
  output.summary({.steps = trainer.steps_done(),
                  .tokens_per_step = trainer.tokens_per_step(),
                  .flops_per_token = trainer.whole_model().training_flops(),
                  .dtype = run.job.optim.dtype,
                  .strategy = std::string(trainer.strategy().name()),
                  .backend = std::string(trainer.world().kind()),
                  .usage = usage,
                  .arena = trainer.arena(),
                  .graph = trainer.step_record(),
                  .no_graph = with_options(no_graph_because(run.job.plan, run.options.trace)),
                  .sample = sample_of_saved(run, trainer.whole_model().config)});
}

}  // namespace

int train_in_steps(const Run& run, Communicator& world) {
  const TrainOptions& o = run.options;
  RunTrace trace(o, world);
  Trainer trainer(run.job, run.sequences, world, trace.get());
  std::vector<std::string> passed_over;
  if (o.resume) run.directory.resume(trainer, o, run.dataset, passed_over);
  check_steps_done(run, trainer.steps_done());
  world.barrier();  // everybody has read what there is before anything is written
  std::unique_ptr<TrainOutput> output;
  if (world.rank() == 0)
    output = begin_output(run, {.model = trainer.whole_model(),
                                .steps = fmt::format("{} steps of {} tokens", o.steps, trainer.tokens_per_step()),
                                .done = trainer.steps_done(),
                                .passed_over = passed_over,
                                .memory = trainer.arena()->region().note()});
  const int status = train_steps(run, trainer, output.get(), trace.get());
  trace.stop(trainer);
  const RunUsage usage = usage_of(world, trainer.communicators(), trainer.arena());
  const bool traced = trace.write(run, trainer, usage);
  if (!output) return status;
  if (traced)
    output->message(fmt::format("the timeline is written; tessera report {} draws it", run.directory.path().string()));
  if (status == 0) say_summary(run, trainer, usage, *output);
  return status;
}

}  // namespace tessera
