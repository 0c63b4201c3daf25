// Cutting comes before memory.
#include "train/model_part.h"

#include "models/layout.h"
#include "parallel/pipeline/passes.h"

namespace tessera {
namespace {

// Each stage that uses a tied weight has a copy of it, on one rank too: so the sums of its gradients have one order.
ModelConfig with_copies(ModelConfig config, bool copies) {
  config.tie_copies = copies;
  return config;
}

}  // namespace

ModelPart::ModelPart(LanguageModel& whole, const ModelFactory& make, const Axes& axes, Options o)
    : schedule_(std::move(o.schedule)),
      layers_(o.layers.empty() ? split_layers(whole, schedule_.stages) : std::move(o.layers)),
      model_(make(with_copies(whole.config, o.tie_copies || schedule_.stages > 1))) {
  cut(axes, o);
  strategy_ = make_data_strategy(*model_, axes.data, o.arena, o.data);
  const int64_t tokens = whole.config.context / axes.cp.size() / (o.sp ? axes.tp.size() : 1);
  stages_ =
      std::make_unique<ModelStages>(*model_, *strategy_,
                                    ModelStages::Options{.layers = layers_,
                                                         .load = std::move(o.load),
                                                         .where = std::move(o.where),
                                                         .activation = {o.sequences, tokens, whole.config.channels},
                                                         .dtype = o.data.dtype,
                                                         .arena = o.arena});
  runtime_ = std::make_unique<PipelineRuntime>(insert_messages(schedule_), axes.pp, *stages_, o.trace);
}

// Cuts the model down to this rank's part, before there is memory for it.
void ModelPart::cut(const Axes& axes, const Options& o) {
  Communicator& cp = axes.cp;
  const int64_t context = model_->config.context;
  const bool ring = o.cp_mode == ContextMode::ring;
  if (cp.size() > 1)
    positions_ = context_positions(context, cp.size(), cp.rank(), ring ? Balance::zigzag : Balance::contiguous);
  model_->place({.tp = &axes.tp,
                 .between = o.sp ? S(1, context / cp.size()) : I,
                 .cp = &cp,
                 .cp_mode = o.cp_mode,
                 .ep = axes.ep});
  keep_stages(*model_, layers_, [&, rank = axes.pp.rank()](int stage) {
    return schedule_.rank_of_stage[static_cast<size_t>(stage)] == rank;
  });
}

}  // namespace tessera
