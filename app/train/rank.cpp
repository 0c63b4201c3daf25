// One rank of `train`: the run, its timeline and its summary.
#include "app/train/rank.h"

#include <string>

#include "app/pretrained.h"
#include "app/trace/timeline.h"
#include "app/train/output.h"
#include "train/run/signals.h"

namespace tessera {

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
  output.summary(output.facts(run, usage, experts), [&](const std::string& record) { run.append(record); });
  return SignalRequests::stop() != 0 ? SignalRequests::exit_status() : 0;
}

}  // namespace tessera
