// One rank of `train`: the run, its timeline and its summary.
#include "app/train/rank.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "app/plan/plan.h"
#include "app/pretrained.h"
#include "app/trace/timeline.h"
#include "app/train/output.h"
#include "app/train/text_sample.h"
#include "tensor/cpu/vectorize.h"
#include "train/run/signals.h"
#include "train/step_graph.h"

namespace tessera {

namespace {

std::optional<double> predict_step_time(const TrainCall& call, const ModelConfig& model) {
  const auto machine = cached_machine_here();
  const bool regular = !call.dataset.has_examples() && call.command.config.plan.dp_mode != DataMode::ps_async;
  if (!machine || !regular) return {};  // irregular steps differ in length
  TrainConfig job = call.command.config;
  job.model = model;
  job.plan.threads_per_rank = cpu::threads();
  return predicted_step(*machine, job);
}

// Adds the remaining facts.
void add_to_summary(const TrainCall& call, LanguageModel& model, TrainOutput::Facts& facts) {
  const ModelConfig& c = model.config;
  const int64_t row =
      facts.tokens_per_step / call.command.config.optim.batch;  // rows of examples are shorter than the context
  facts.flops_per_token = model.training_flops() - 12 * static_cast<double>(c.layers) * c.keys() *
                                                       static_cast<double>(c.attended() - std::min(c.attended(), row));
  facts.rank_peak_flops = measured_peak_flops(call.command.config.optim.dtype, facts.usage.arena);
  facts.no_graph =
      with_options(no_graph_because(call.command.config, call.command.options.trace, call.dataset.has_examples()));
  facts.sample = sample_text(call, model.config);
}

}  // namespace

int train_rank(const TrainCall& call, Communicator& world) {
  const TrainConfig& config = call.command.config;
  RunTrace trace(call.command.options, world);
  TrainOutput output(call);
  RunSetup setup{.config = config,
                 .directory = call.directory,
                 .sequences = call.sequences,
                 .dataset = &call.dataset,
                 .trace = trace.get(),
                 .set = &call.command.set};
  if (config.run.init)
    setup.weights = [&](const ModelConfig& model) {
      return first_weights(open_pretrained(*config.run.init, config.run.base), model);
    };
  Run run(setup, world, &output);
  const RunResult result = run.train();
  const bool first = world.rank() == 0;
  if (first && result.stopped) output.stopped(result);
  Trainer* const trainer = run.trainer().synchronous();
  if (trainer) trace.stop(trainer->state());
  const RunUsage usage = run.usage();
  const ExpertLoad experts = trainer ? expert_load(trainer->state()) : ExpertLoad();
  if (trainer && trace.write(call, trainer->state(), usage) && first)
    output.message(fmt::format("timeline written; show it with tessera report {}", call.directory.path().string()));
  if (result.stopped) return SignalRequests::exit_status();
  if (!first) return 0;
  if (!result.note.empty()) output.message(result.note);
  LanguageModel& model = run.trainer().full_model();
  TrainOutput::Facts facts{.steps = result.steps,
                           .tokens_per_step = tokens_per_step(config, call.sequences),
                           .strategy = trainer ? std::string(trainer->state().strategy().name())
                                               : std::string(value_name(DataMode::ps_async)),
                           .usage = usage,
                           .graph = trainer ? trainer->step_record() : StepGraph::Record(),
                           .predicted_s = predict_step_time(call, model.config),
                           .experts = experts};
  add_to_summary(call, model, facts);
  output.summary(facts, [&](const std::string& record) { run.append(record); });
  return SignalRequests::stop() != 0 ? SignalRequests::exit_status() : 0;
}

}  // namespace tessera
