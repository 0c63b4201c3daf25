// Partitioning of layers into stages, and their passes.
#include "models/stages.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace tessera {

// best[s][l]: cost of the slowest stage if the first s stages have l layers. The last stage includes the head. On ties,
// early stages get fewer layers, since they have more micro-batches in flight.
std::vector<Range> split_layers(LanguageModel& model, int stages) {
  const int64_t layers = model.config.layers;
  if (stages < 1 || stages > layers)
    throw Error("[pipeline] " + std::to_string(layers) + " layers cannot be partitioned into " +
                std::to_string(stages) + " stages; expected at most one stage per layer");
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const auto width = static_cast<size_t>(layers) + 1;
  std::vector<std::vector<double>> best(static_cast<size_t>(stages) + 1, std::vector<double>(width, kNever));
  std::vector<std::vector<int64_t>> from(best.size(), std::vector<int64_t>(width, 0));
  best[0][0] = 0;
  std::vector<double> before(width, 0.0);  // FLOPs of layers before layer l
  for (size_t l = 1; l < width; ++l) before[l] = before[l - 1] + model.layer_flops(static_cast<int64_t>(l) - 1);
  for (size_t s = 1; s < best.size(); ++s)
    for (size_t l = s; l < width; ++l)
      for (size_t k = s - 1; k < l; ++k) {
        const double own = before[l] - before[k] + (s + 1 == best.size() ? model.head_flops() : 0);
        const double slowest = std::max(best[s - 1][k], own);
        if (slowest >= best[s][l]) continue;
        best[s][l] = slowest;
        from[s][l] = static_cast<int64_t>(k);
      }
  std::vector<Range> out(static_cast<size_t>(stages));
  int64_t end = layers;
  for (size_t s = out.size(); s-- > 0;) {
    const int64_t begin = from[s + 1][static_cast<size_t>(end)];
    out[s] = {begin, end};
    end = begin;
  }
  return out;
}

std::vector<int> stages_of_units(LanguageModel& model, const std::vector<Range>& layers) {
  std::vector<int> out;
  for (const int64_t layer : model.layers_of_units()) {
    int stage = 0;
    while (stage + 1 < static_cast<int>(layers.size()) && layer >= layers[static_cast<size_t>(stage)].end) ++stage;
    out.push_back(stage);
  }
  return out;
}

void retain_stages(LanguageModel& model, const std::vector<Range>& layers, const std::function<bool(int stage)>& mine) {
  const std::vector<int> stages = stages_of_units(model, layers);
  const std::vector<Module::Unit> units = model.layout();
  for (size_t u = 0; u < units.size(); ++u)
    if (!mine(stages[u])) units[u].module->set_local(false);
}

ModelStages::ModelStages(LanguageModel& model, DataStrategy& strategy, Options options)
    : model_(model), strategy_(strategy), options_(std::move(options)), units_(options_.layers.size(), {0, 0}) {
  if (options_.layers.empty()) throw FieldError("layers", "expected those of each stage, got none");
  const std::vector<int> stages = stages_of_units(model, options_.layers);
  for (size_t u = 0; u < stages.size(); ++u) {
    UnitRange& range = units_[static_cast<size_t>(stages[u])];
    if (range.end == 0) range.begin = u;
    range.end = u + 1;
  }
}

// Frees each layer's input early.
Var ModelStages::body(int stage, Var x) {
  const Range range = options_.layers[static_cast<size_t>(stage)];
  for (int64_t layer = range.begin; layer < range.end; ++layer) x = model_.layer(layer)(x);
  if (stage == last()) x = model_.finish(x);
  return x;
}

StageOutput ModelStages::forward(int stage, int microbatch, const Var& input) {
  const bool first = stage == 0;
  Microbatch tokens;
  if (first || stage == last()) tokens = source().load(microbatch, first, stage == last());
  Tensor ids;
  if (first) ids = strategy_.batches().scatter_batch(tokens.ids).narrow(1, 0, source().columns(microbatch));
  Var x = body(stage, first ? model_.embedded(ids.contiguous()) : input);
  if (stage != last()) return {std::move(x), {}, 0};
  const Head head{[this](const Var& hidden) { return model_.logits(hidden); },
                  [this](const Var& hidden, const Tensor& targets, double scale) {
                    return model_.head_loss(hidden, targets, scale);
                  }};
  Root root = strategy_.batches().loss(x, tokens.targets, tokens.scale, head);
  return {std::move(root.value), std::move(root.seed), root.loss_sum};
}

Tensor ModelStages::make_activation(int, int microbatch) {
  Shape shape = options_.activation;
  shape[1] = source().columns(microbatch) / options_.token_parts;
  return Tensor::empty(shape, options_.dtype, options_.arena, Category::activations);
}

void ModelStages::enter(int, int microbatch) { model_.set_step(source().where(microbatch)); }

void ModelStages::accumulate(int stage, int microbatch, const std::function<void()>& pass) {
  step_->accumulate(microbatch, units_[static_cast<size_t>(stage)], pass);
}

double ModelStages::evaluate(const Microbatch& tokens, const Schedule& schedule, Communicator& pipeline) {
  const NoGrad no_grad;
  Shape shape = options_.activation;
  shape[0] = tokens.ids.dim(0);
  shape[1] = tokens.ids.dim(1) / options_.token_parts;
  Tensor output;  // from the preceding stage if it is local
  for (int stage = 0; stage <= last(); ++stage) {
    if (schedule.rank_of_stage[static_cast<size_t>(stage)] != pipeline.rank()) continue;
    Tensor input = std::exchange(output, {});
    if (stage > 0 && schedule.crosses(stage - 1)) {
      input = Tensor::empty(shape, options_.dtype, options_.arena, Category::activations);
      pipeline.recv(input, schedule.rank_of_stage[static_cast<size_t>(stage) - 1], stage);
    }
    Var x = body(stage, stage == 0 ? model_.embed(tokens.ids) : Var(std::move(input)));
    if (stage == last()) return model_.head_loss(x, tokens.targets, 1).loss_sum;
    output = std::move(x).take();
    if (schedule.crosses(stage)) {
      pipeline.send(output, schedule.rank_of_stage[static_cast<size_t>(stage) + 1], stage + 1);
      output = Tensor();
    }
  }
  return 0;
}

}  // namespace tessera
