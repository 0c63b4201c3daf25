// Cutting comes before memory.
#include "train/model_part.h"

#include "models/gpt_parallel.h"
#include "parallel/pipeline/passes.h"

namespace tessera {
namespace {

// Each stage that uses a tied weight has a copy of it, on one rank too: so the sums of its gradients have one order.
GptConfig of_stages(GptConfig config, int stages) {
  config.tied = stages == 1;
  return config;
}

}  // namespace

ModelPart::ModelPart(const GptConfig& whole, const Axes& axes, Options o)
    : schedule_(std::move(o.schedule)),
      layers_(split_layers(whole, schedule_.stages)),
      model_(of_stages(whole, schedule_.stages)) {
  cut(whole, axes, o);
  strategy_ = make_data_strategy(model_, axes.data, o.arena, o.data);
  const int64_t tokens = whole.context / axes.cp.size() / (o.sp ? axes.tp.size() : 1);
  stages_ = std::make_unique<GptStages>(
      model_, *strategy_,
      GptStages::Options{
          .layers = layers_,
          .loss = [this, &tp = axes.tp](const Var& hidden, const Tensor& targets,
                                        double scale) { return parallel_loss(model_, hidden, targets, scale, tp); },
          .scale = o.scale,
          .load = std::move(o.load),
          .where = std::move(o.where),
          .activation = {o.sequences, tokens, whole.channels},
          .dtype = o.data.dtype,
          .arena = o.arena});
  runtime_ = std::make_unique<PipelineRuntime>(insert_messages(schedule_), axes.pp, *stages_, o.trace);
}

// What this rank has of the model, before there is memory for it.
void ModelPart::cut(const GptConfig& whole, const Axes& axes, const Options& o) {
  Communicator& cp = axes.cp;
  const bool ring = o.cp_mode == ContextMode::ring;
  if (cp.size() > 1)
    positions_ = context_positions(whole.context, cp.size(), cp.rank(), ring ? Balance::zigzag : Balance::contiguous);
  tensor_parallel(model_, axes.tp, o.sp ? S(1, whole.context / cp.size()) : I);
  context_parallel(model_, cp, o.cp_mode);
  keep_stages(model_, layers_, [&, rank = axes.pp.rank()](int stage) {
    return schedule_.rank_of_stage[static_cast<size_t>(stage)] == rank;
  });
}

}  // namespace tessera
