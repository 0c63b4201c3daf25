// Parameters and forward passes of the layers.
#include "nn/layers.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "nn/adapters/lora.h"
#include "nn/quantize/packed.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/random.h"

namespace tessera {

namespace {

PackedWeights* cached_if_profitable(PackedWeights& packs) {
  packs.caches = cpu::packing_is_profitable();
  return &packs;
}

Attention::Options resolved(int64_t channels, Attention::Options o) {
  if (o.heads <= 0 || (o.head_dim == 0 && channels % o.heads != 0))
    throw Error("[attention] " + std::to_string(o.heads) + " heads do not divide " + std::to_string(channels) +
                " channels");
  if (o.kv_heads == 0) o.kv_heads = o.heads;
  if (o.head_dim == 0) o.head_dim = channels / o.heads;
  if (o.kv_heads < 0 || o.heads % o.kv_heads != 0)
    throw Error("[attention] " + std::to_string(o.kv_heads) +
                " key-value heads do not divide the number of query heads, " + std::to_string(o.heads));
  if (o.window < 0) reject("attention", "a `window` of at least 0", std::to_string(o.window));
  if (!(o.dropout >= 0 && o.dropout < 1)) reject("attention", "a `dropout` in [0, 1)", std::to_string(o.dropout));
  return o;
}

}  // namespace

Linear::Linear(int64_t in, int64_t out, const Options& options)
    : weight(param("weight", {out, in}, Init::normal(options.deviation))),
      bias(options.bias ? &param("bias", {out}, Init::zeros()) : nullptr),
      options_(options) {}

LinearWeights Linear::weights() {
  packs_.shards = hooks.shards;
  return {used(weight), hooks.output ? Var() : used_bias(), cached_if_profitable(packs_), hooks.input};
}

Var Linear::forward(const Var& x) {
  const bool plain = !options_.activation;
  const Var bias_used = used_bias(), b = plain ? bias_used : Var(),
            w = hooks.weight ? hooks.weight(x.dtype()) : used(weight);
  packs_.shards = hooks.shards;
  PackedWeights* const packs = hooks.weight ? nullptr : cached_if_profitable(packs_);
  Var y = hooks.matmul   ? hooks.matmul(x, w, b, packs)
          : hooks.output ? hooks.output(linear(x, w, Var(), packs, hooks.input), b)
                         : linear(x, w, b, packs, hooks.input);
  for (Lora* adapter : hooks.adapters) y = adapter->add_to(std::move(y), x);
  if (plain) return y;
  return activate(std::move(y), *options_.activation, bias_used);
}

void Linear::quantize(const Packing& packing) {
  Module::quantize(weight, packing);
  hooks.weight = [&packed = parameter(weight)](DType dtype) { return unpacked(packed, dtype); };
}

Lora& Linear::adapt(const std::string& name, int64_t first, int64_t out, const LoraOptions& options) {
  return *hooks.adapters.emplace_back(&child<Lora>(name, weight.dim(1), first, out, options));
}

Norm::Norm(int64_t channels, const NormOptions& options, Recompute recompute)
    : weight(param("weight", {channels}, Init::ones())),
      bias(options.center ? &param("bias", {channels}, Init::zeros()) : nullptr),
      options_(options),
      recompute_(recompute == Recompute::activation_norm) {}

Embedding::Embedding(int64_t entries, int64_t channels, double deviation)
    : weight(param("weight", {entries, channels}, Init::normal(deviation))) {}

Var Embedding::lookup(const Tensor& ids) {
  return call([&](const Var&) { return hooks.lookup ? hooks.lookup(ids, used(weight)) : embedding(ids, used(weight)); },
              Var());
}

Var Embedding::project(const Var& x) {
  return call(
      [this](const Var& in) {
        PackedWeights* const packs = cached_if_profitable(packs_);
        return hooks.matmul ? hooks.matmul(in, used(weight), Var(), packs) : linear_by_rows(in, used(weight), packs);
      },
      x);
}

Var Embedding::logits(const Var& x) {
  const Var all = project(x);
  const int64_t width = all.dim(all.shape().ndim() - 1), rows = all.value().numel() / width;
  return reshape(all, {rows, width});
}

Loss Embedding::loss(const Var& x, const Tensor& targets, double scale) {
  if (hooks.loss) return hooks.loss(x, targets, scale);
  Loss out;
  out.mean = call(
      [&](const Var& in) {
        out = linear_cross_entropy(in, used(weight), targets, scale, cached_if_profitable(packs_));
        return std::exchange(out.mean, Var());
      },
      x);
  return out;
}

Var Dropout::apply(Var x) {
  const StepInfo at = step();
  if (p_ == 0 || !at.training) return x;
  DropoutTile tile;
  tile.random = Philox::named(at.seed, full_name());
  tile.step = static_cast<uint64_t>(at.step);
  tile.step_on_gpu = at.step_on_gpu;
  tile.first_sequence = at.first_sequence;
  tile.tokens_total = at.tokens_total;
  tile.positions = at.positions;
  tile.first_channel = first_channel_;
  tile.channels_total = channels_total_;
  return dropout(std::move(x), p_, tile);
}

Rotary::Rotary(int64_t context, int64_t head_dim, const RotaryOptions& o)
    : context_(context), head_dim_(head_dim), options_(o) {
  const RotaryOptions defaults;
  const bool scaled = o.scaling != RopeScaling::none, yarn = o.scaling == RopeScaling::yarn,
             bands = yarn || o.scaling == RopeScaling::llama3;
  if (head_dim % 2 != 0)
    throw FieldError("head_dim", "rotary embeddings rotate pairs of elements; expected an even number such as " +
                                     std::to_string(head_dim + 1) + ", got " + std::to_string(head_dim));
  if (scaled && o.factor == 1)
    throw FieldError("rope_factor", "expected the context extension factor (above 1), got 1");
  if (!scaled && o.factor != 1)
    throw FieldError("rope_factor", "requires `rope_scaling` linear, llama3 or yarn, got none");
  for (const auto& [field, given] : {std::pair{"rope_low_freq", o.low_freq_factor != defaults.low_freq_factor},
                                     {"rope_high_freq", o.high_freq_factor != defaults.high_freq_factor},
                                     {"rope_original_context", o.original_context != defaults.original_context}})
    if (given && !bands) throw FieldError(field, "requires `rope_scaling` llama3 or yarn");
  if (!yarn && o.attention_factor != defaults.attention_factor)
    throw FieldError("rope_attention", "requires `rope_scaling` yarn");
  if (bands && !(o.low_freq_factor < o.high_freq_factor))
    throw FieldError("rope_low_freq", "must be less than `rope_high_freq`");
}

Var Rotary::apply(Var x, int64_t heads, const StepInfo& at) {
  const Tensor& like = x.value();
  if (!table_.defined()) {
    const DType wide = accum_dtype(like.dtype());
    table_ = rotary_table(options_, context_, head_dim_, wide, like.arena());
  }
  RopeArgs rope{.heads = heads, .table = table_, .positions = at.documents.positions};
  if (rope.positions.defined() || !at.positions.empty()) {
    const int64_t last =
        at.positions.empty() ? like.dim(1) - 1 : *std::max_element(at.positions.begin(), at.positions.end());
    if (last >= context_)
      throw Error("[rotary] position " + std::to_string(last) + "; the context length is " + std::to_string(context_));
  }
  if (!rope.positions.defined() && !at.positions.empty()) {
    const std::vector<int32_t> given(at.positions.begin(), at.positions.end());
    // A dry run does not write: touched pages would consume real memory.
    rope.positions = cpu::DryRun::here() ? like.make({std::ssize(given)}, DType::int32)
                                         : Tensor::constant<int32_t>(given, {std::ssize(given)}, like.arena());
  }
  return rotate(std::move(x), rope);
}

Attention::Attention(int64_t channels, const Options& given) : Attention(resolved(channels, given), channels) {}

Attention::Attention(const Options& o, int64_t channels)
    : qkv(child<Linear>("qkv", channels, Heads{o.heads, o.kv_heads}.packed() * o.head_dim,
                        Linear::Options{.bias = o.qkv_bias})),
      proj(child<Linear>("proj", o.heads * o.head_dim, channels,
                         Linear::Options{.bias = o.projection_bias, .deviation = o.projection_deviation})),
      norm_q(o.norm_eps ? &param("norm_q.weight", {o.head_dim}, Init::ones()) : nullptr),
      norm_k(o.norm_eps ? &param("norm_k.weight", {o.head_dim}, Init::ones()) : nullptr),
      options_(o),
      here_(heads()) {
  qkv.hooks.shards.segments = {o.heads * o.head_dim, o.kv_heads * o.head_dim, o.kv_heads * o.head_dim};
  // Without rotation or normalization, the key bias adds a constant to all inputs of a softmax, leaving its output
  // unchanged.
  if (qkv.bias && !o.rotary && !o.norm_eps)
    qkv.parameter(*qkv.bias).zero_grad_range = {o.heads * o.head_dim, (o.heads + o.kv_heads) * o.head_dim};
}

AttentionOptions Attention::at_step() {
  const StepInfo at = step();
  AttentionOptions o;
  o.first_head = at.first_head;
  o.heads_total = at.heads_total;
  o.tokens_total = at.tokens_total;
  o.starts = at.documents.starts;
  o.starts_may_be_ignored = at.documents.only_padding;
  o.window = options_.window;
  if (options_.dropout == 0 || !at.training) return o;
  o.dropout = options_.dropout;
  o.random = Philox::named(at.seed, full_name());
  o.step = static_cast<uint64_t>(at.step);
  o.step_on_gpu = at.step_on_gpu;
  o.first_sequence = at.first_sequence;
  return o;
}

Var Attention::prepare(Var packed) {
  if (norm_q) packed = norm_heads(packed, here_, used(*norm_q), used(*norm_k), *options_.norm_eps);
  if (options_.rotary) packed = options_.rotary->apply(std::move(packed), here_.query + here_.key, step());
  return packed;
}

Var Attention::forward(const Var& x) {
  const Var packed = prepare(qkv(x));
  const AttentionOptions options = at_step();
  if (!options_.recompute || !grad_enabled()) return proj(core_(packed, here_, options));
  const auto attend = [this, options](const std::vector<Var>& in) { return core_(in[0], here_, options); };
  return proj(checkpoint(attend, {packed.tracked()}, true));
}

// Texts may differ in length, so each attends separately.
Tensor Attention::decode(const Tensor& x, std::span<KvCache* const> texts, int64_t answers) {
  const NoGrad no_grad;
  if (std::ssize(texts) != x.dim(0) || std::ranges::count(texts, nullptr) > 0)
    reject("attention", "texts: one cache for each row of " + x.describe(), std::to_string(texts.size()));
  const int64_t t = x.dim(1), d = options_.head_dim;
  const Tensor packed = prepare(qkv(Var(x))).value();
  const Tensor out = x.make({x.dim(0), answers, here_.query * d});
  for (size_t i = 0; i < texts.size(); ++i) {
    KvCache& cache = *texts[i];
    const auto at = static_cast<int64_t>(i);
    if (cache.length + t > cache.capacity)
      throw Error("[attention] " + std::to_string(cache.length + t) + " tokens exceed the cache capacity, " +
                  std::to_string(cache.capacity));
    if (!cache.keys.defined()) {
      cache.keys = x.make({1, cache.capacity, here_.key, d});
      cache.values = x.make({1, cache.capacity, here_.key, d});
    }
    const Tensor own = packed.narrow(0, at, 1);
    cache.keys.narrow(1, cache.length, t).copy_from(packed_slice(own, here_, 1));
    cache.values.narrow(1, cache.length, t).copy_from(packed_slice(own, here_, 2));
    cache.length += t;
    const AttentionResult a =
        attention(packed_slice(own, here_, 0).narrow(1, t - answers, answers), cache.keys.narrow(1, 0, cache.length),
                  cache.values.narrow(1, 0, cache.length), {.window = options_.window});
    out.narrow(0, at, 1).copy_from(a.out.reshape({1, answers, -1}));
  }
  return proj(Var(out)).value();
}

GatedMlp::GatedMlp(int64_t channels, int64_t hidden, const MlpOptions& o)
    : gate_up(child<Linear>("gate_up", channels, 2 * hidden, Linear::Options{.bias = o.bias})),
      down(child<Linear>("down", hidden, channels, Linear::Options{.bias = o.bias, .deviation = o.down_deviation})),
      activation_(o.activation) {
  gate_up.hooks.shards.segments = {hidden, hidden};
}

Mlp::Mlp(int64_t channels, int64_t hidden, const MlpOptions& o)
    : up(child<Linear>("up", channels, hidden, Linear::Options{.bias = o.bias, .activation = o.activation})),
      down(child<Linear>("down", hidden, channels, Linear::Options{.bias = o.bias, .deviation = o.down_deviation})),
      activation_(o.activation) {}

Var Mlp::forward(const Var& x) {
  if (!up.may_fuse() || !down.may_fuse()) return down(up(x));
  return down.finish(mlp(x, up.weights(), down.weights(), activation_));
}

}  // namespace tessera
