// Partitions the model before memory is allocated.

#include "train/model_part.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "models/layout.h"
#include "parallel/pipeline/validate.h"

namespace tessera {
namespace {

// Each stage that uses a tied weight has a copy, even on one rank, which fixes the order of the gradient sum.
ModelConfig with_copies(ModelConfig config, bool copies) {
  config.tie_copies = copies;
  return config;
}

// Layer i is in fragment i mod P; units before the first or after the last layer belong to that layer's fragment; all
// uses of a tied weight are in one fragment.
std::vector<int64_t> unit_fragments(LanguageModel& model, int64_t fragments) {
  const std::vector<Module::Unit> units = model.layout();
  std::vector<int64_t> out = model.layers_of_units();
  for (size_t u = 0; u < out.size(); ++u) {
    const bool tied = units[u].slots[0].parameter->is_tied();
    out[u] = tied ? 0 : std::clamp<int64_t>(out[u], 0, model.config.layers - 1) % fragments;
  }
  return out;
}

}  // namespace

ModelPart::ModelPart(LanguageModel& full, const ModelFactory& make, const Axes& axes, Options o)
    : schedule_(std::move(o.schedule)),
      layers_(o.layers.empty() ? split_layers(full, schedule_.stages) : std::move(o.layers)),
      model_(build_model(make, with_copies(full.config, o.plan.tie_copies || schedule_.stages > 1))) {
  cut(axes, o);
  if (auto* const diloco = std::get_if<DilocoOptions>(&o.data.strategy))
    diloco->fragments = unit_fragments(*model_, diloco->sync.fragments);
  strategy_ = make_data_strategy(*model_, axes.data, o.arena, o.data);
  const int64_t shards = o.plan.sp ? axes.tp.size() : 1, tokens = full.config.context / axes.cp.size() / shards;
  stages_ =
      std::make_unique<ModelStages>(*model_, *strategy_,
                                    ModelStages::Options{.layers = layers_,
                                                         .activation = {o.sequences, tokens, full.config.channels},
                                                         .token_parts = shards,
                                                         .dtype = o.data.dtype,
                                                         .arena = o.arena});
  runtime_ = std::make_unique<PipelineRuntime>(insert_messages(schedule_), axes.pp, *stages_, o.trace);
}

// Reduces the model to this rank's shard before materialization.
void ModelPart::cut(const Axes& axes, const Options& o) {
  Communicator& cp = axes.cp;
  const int64_t context = model_->config.context;
  if (cp.size() > 1) positions_ = context_positions(context, cp.size(), cp.rank(), sequence_partition(o.plan.cp_mode));
  model_->place({.tp = &axes.tp,
                 .between = o.plan.sp ? S(1, context / cp.size()) : I,
                 .cp = &cp,
                 .cp_mode = o.plan.cp_mode,
                 .ep = axes.ep});
  retain_stages(*model_, layers_, [&, rank = axes.pp.rank()](int stage) {
    return schedule_.rank_of_stage[static_cast<size_t>(stage)] == rank;
  });
}

}  // namespace tessera
