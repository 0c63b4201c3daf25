// Operations common to all language models.
#include "models/language_model.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "models/layout.h"

namespace tessera {
namespace {

// The caches of a text's local layers have equal lengths; other layers may be on other ranks.
int64_t context_length(const TextCache& text) {
  int64_t max_length = 0;
  for (const KvCache& layer : text) max_length = std::max(max_length, layer.length);
  return max_length;
}

}  // namespace

Tensor DecoderLayer::decode(const Tensor&, std::span<KvCache* const>, int64_t) {
  throw Error("[model] '" + full_name() + "' does not support decoding: decode() is not overridden");
}

Loss LanguageModel::head_loss(const Var& hidden_states, const Tensor& targets, double scale) {
  return cross_entropy(logits(hidden_states), targets.contiguous().reshape({-1}), scale);
}

void LanguageModel::place(const ModelAxes& axes) {
  for (const Communicator* axis : {axes.tp, axes.cp, axes.ep})
    if (is_cut(axis))
      throw FieldError(axis->axis(),
                       "this model does not support this axis; expected size 1, got " + std::to_string(axis->size()));
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

void LanguageModel::mark_matrices(Module& layer) {
  for (Parameter* p : layer.parameters()) p->full_matrix_update = p->full_shape.ndim() == 2;
  for (Attention* a : layer.all<Attention>()) {
    const int64_t key = a->heads().key * a->head_dim();
    a->qkv.parameter(a->qkv.weight).rows = {a->heads().query * a->head_dim(), key, key};
  }
  for (GatedMlp* mlp : layer.all<GatedMlp>()) {
    Parameter& both = mlp->gate_up.parameter(mlp->gate_up.weight);
    both.rows = {both.full_shape[0] / 2, both.full_shape[0] / 2};
  }
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

// Each of `rows` texts needs a cache with an entry for every layer.
static void check_texts(int64_t rows, std::span<TextCache* const> texts, int64_t layers) {
  if (std::ssize(texts) != rows)
    throw Error("[model] texts: expected a cache for each of " + std::to_string(rows) + " rows, got " +
                std::to_string(texts.size()));
  for (const TextCache* text : texts) {
    require_object(text, "[model] texts");
    if (std::ssize(*text) != layers)
      throw Error("[model] texts: a cache of " + std::to_string(text->size()) + " layers; expected " +
                  std::to_string(layers));
  }
}

StepInfo LanguageModel::decode_step(int64_t tokens, std::span<TextCache* const> texts, const ArenaPtr& arena) const {
  check_texts(std::ssize(texts), texts, config.layers);
  std::vector<int32_t> at;
  for (const TextCache* text : texts)
    for (int64_t t = 0; t < tokens; ++t) at.push_back(static_cast<int32_t>(context_length(*text) + t));
  const Tensor positions = Tensor::constant<int32_t>(at, {std::ssize(texts), tokens}, arena);
  return {.tokens_total = tokens, .documents = {{}, positions}};
}

Tensor LanguageModel::decode_first(const Tensor& ids, std::span<TextCache* const> texts) {
  const NoGrad no_grad;
  check_texts(ids.dim(0), texts, config.layers);
  for (const TextCache* text : texts)
    if (context_length(*text) + ids.dim(1) > config.context)
      throw Error("[model] " + std::to_string(context_length(*text) + ids.dim(1)) +
                  " tokens exceed the context length of " + std::to_string(config.context));
  return embed(ids).value();
}

Tensor LanguageModel::decode_layer(int64_t i, const Tensor& x, std::span<TextCache* const> texts) {
  const NoGrad no_grad;
  check_texts(x.dim(0), texts, config.layers);
  std::vector<KvCache*> own;
  for (TextCache* text : texts) own.push_back(&(*text)[checked_index("model", "a layer", i, config.layers)]);
  const int64_t answers = i + 1 == config.layers ? 1 : x.dim(1);  // decode_last() reads only the last token
  DecoderLayer& one = layer(i);
  return one.call([&](const Var& in) { return Var(one.decode(in.value(), own, answers)); }, Var(x)).value();
}

Tensor LanguageModel::decode_last(const Tensor& x) {
  const NoGrad no_grad;
  return logits(finish(Var(x.narrow(1, x.dim(1) - 1, 1).contiguous()))).value();
}

Tensor LanguageModel::decode(const Tensor& ids, std::span<TextCache* const> texts) {
  check_texts(ids.dim(0), texts, config.layers);
  set_step(decode_step(ids.dim(1), texts, ids.arena()));
  Tensor x = decode_first(ids, texts);
  for (int64_t i = 0; i < config.layers; ++i) x = decode_layer(i, x, texts);
  set_step({});
  return decode_last(x);
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

int64_t LanguageModel::idle_elements(int64_t i) {
  int64_t idle = 0;
  for (const MixtureOfExperts* mixture : layer(i).all<MixtureOfExperts>()) idle += mixture->idle_elements();
  return idle;
}

double LanguageModel::layer_flops(int64_t i) {
  int64_t elements = 0;
  for (const Parameter* p : layer(i).parameters()) elements += p->full_shape.ndim() == 2 ? p->full_shape.numel() : 0;
  elements -= idle_elements(i);
  return 2 * static_cast<double>(elements) + 2 * config.keys() * static_cast<double>(config.attended());
}

double LanguageModel::training_flops() {
  int64_t passes = 0;  // per element: forward, input gradient, weight gradient
  const std::vector<Unit> units = layout();
  const std::vector<int64_t> at = layers_of_units();
  for (size_t u = 0; u < units.size(); ++u)
    for (const Slot& slot : units[u].slots)
      if (at[u] >= 0 || slot.parameter->is_tied())
        passes += (units[u].trainable ? 3 : 2) * slot.parameter->full_shape.numel();
  for (int64_t i = 0; i < config.layers; ++i) passes -= (config.lora.rank > 0 ? 2 : 3) * idle_elements(i);
  return 2 * static_cast<double>(passes) + 12 * static_cast<double>(config.layers * config.attended()) * config.keys();
}

}  // namespace tessera
