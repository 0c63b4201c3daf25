// What holds for any language model.
#include "models/language_model.h"

#include <numeric>

#include "autograd/checkpoint.h"
#include "models/layout.h"
#include "tensor/field_error.h"

namespace tessera {

Tensor DecoderLayer::decode(const Tensor&, KvCache&) {
  throw Error("[model] '" + full_name() + "' cannot decode: it has no decode() of its own");
}

Loss LanguageModel::head_loss(const Var& hidden_states, const Tensor& targets, double scale) {
  return cross_entropy(logits(hidden_states), targets.contiguous().reshape({-1}), scale);
}

void LanguageModel::place(const ModelAxes& axes) {
  for (const Communicator* axis : {axes.tp, axes.cp})
    if (is_cut(axis))
      throw FieldError(axis->axis(),
                       "this model declares no layout for it; expected 1, found " + std::to_string(axis->size()));
}

Var LanguageModel::embedded(const Tensor& ids) {
  Var x = embed(ids);
  return config.lora.rank > 0 && grad_enabled() ? x.tracked() : x;
}

Var LanguageModel::hidden(const Tensor& ids) {
  Var x = embedded(ids);
  for (int64_t i = 0; i < config.layers; ++i) x = layer(i)(x);
  return finish(x);
}

void LanguageModel::recompute(Module& layer) {
  layer.wrap([](const Inner& inner, const Var& x) {
    if (!grad_enabled()) return inner(x);
    return checkpoint([inner](const std::vector<Var>& in) { return inner(in[0]); }, {x.tracked()});
  });
}

Embedding& LanguageModel::make_head(Embedding& tokens) {
  Parameter& table = tokens.parameter(tokens.weight);
  if (config.tied) table.tie = table.name;
  if (config.tied && !config.tie_copies) return tokens;
  Embedding& own = child<Embedding>("head", config.vocab, config.channels);
  own.parameter(own.weight).tie = table.tie;
  return own;
}

Loss LanguageModel::loss(const Tensor& ids, const Tensor& targets, double scale) {
  return head_loss(hidden(ids), targets, scale);
}

std::vector<KvCache> LanguageModel::caches(int64_t batch) {
  const Tensor& like = parameters().at(0)->var.value();
  std::vector<KvCache> made(static_cast<size_t>(config.layers));
  for (KvCache& cache : made) {
    const Shape shape{batch, config.context, config.all_heads().key, config.head_size()};
    cache.keys = like.make(shape);
    cache.values = like.make(shape);
  }
  return made;
}

Tensor LanguageModel::decode(const Tensor& ids, std::vector<KvCache>& kv) {
  const NoGrad no_grad;
  const int64_t before = kv.at(0).length, t = ids.dim(1);
  std::vector<int64_t> positions(static_cast<size_t>(t));
  std::iota(positions.begin(), positions.end(), before);
  set_step({.positions = positions, .tokens_total = before + t});
  Tensor x = embed(ids).value();
  set_step({});  // which sees no positions that are gone
  for (size_t i = 0; i < kv.size(); ++i) x = layer(static_cast<int64_t>(i)).decode(x, kv[i]);
  return logits(finish(Var(x.narrow(1, t - 1, 1).contiguous()))).value();
}

std::vector<int64_t> LanguageModel::layers_of_units() {
  std::vector<int64_t> out;
  int64_t reached = -1;
  for (const Unit& unit : layout()) {
    int64_t at = reached < 0 ? -1 : config.layers;
    for (int64_t i = 0; i < config.layers && at != i; ++i)
      if (layer(i).contains(*unit.module)) at = i;
    reached = std::max(reached, at);
    out.push_back(at);
  }
  return out;
}

double LanguageModel::layer_flops(int64_t i) {
  int64_t elements = 0;
  for (const Parameter* p : layer(i).parameters()) elements += p->whole.rank() == 2 ? p->whole.numel() : 0;
  return 2 * static_cast<double>(elements) + 2 * static_cast<double>(config.context * config.attended());
}

double LanguageModel::training_flops() {
  int64_t passes = 0;  // of elements: a forward one, one for the gradient of what goes in, and one for its own
  const std::vector<Unit> units = layout();
  const std::vector<int64_t> at = layers_of_units();
  for (size_t u = 0; u < units.size(); ++u)
    for (const Slot& slot : units[u].slots)
      if (at[u] >= 0 || slot.parameter->is_tied())
        passes += (units[u].trainable ? 3 : 2) * slot.parameter->whole.numel();
  return 2 * static_cast<double>(passes) + 12 * static_cast<double>(config.layers * config.attended() * config.context);
}

}  // namespace tessera
