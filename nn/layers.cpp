// Parameters and forward passes of the layers.
#include "nn/layers.h"

#include <utility>

#include "tensor/random.h"

namespace tessera {
namespace {

// Packed copies where the processor makes them pay.
WeightPacks* that_pay(WeightPacks& packs) { return cpu::packing_pays() ? &packs : nullptr; }

bool makes_gelu_again(Recompute r) { return r == Recompute::gelu || r == Recompute::gelu_norm; }

Var multiply(const Product& product, const Var& x, const Var& w, const Var& b, WeightPacks* packs) {
  return product ? product(x, w, b, packs) : linear(x, w, b, packs);
}

}  // namespace

Linear::Linear(int64_t in, int64_t out, const Options& options)
    : weight(param("weight", {out, in}, Init::normal(options.deviation))),
      bias(options.bias ? &param("bias", {out}, Init::zeros()) : nullptr),
      options_(options) {}

LinearWeights Linear::weights() { return {seen(weight), bias ? seen(*bias) : Var(), that_pay(packs_)}; }

Var Linear::forward(const Var& x) {
  const Var b = bias ? seen(*bias) : Var();
  const bool plain = options_.activation == Activation::none;
  Var y = multiply(product_, x, seen(weight), plain ? b : Var(), that_pay(packs_));
  if (plain) return y;
  return bias_gelu(std::move(y), b, makes_gelu_again(options_.recompute));
}

Norm::Norm(int64_t channels, const NormOptions& options, Recompute recompute)
    : weight(param("weight", {channels}, Init::ones())),
      bias(options.center ? &param("bias", {channels}, Init::zeros()) : nullptr),
      options_(options),
      recompute_(recompute == Recompute::gelu_norm) {}

Embedding::Embedding(int64_t entries, int64_t channels, double deviation)
    : weight(param("weight", {entries, channels}, Init::normal(deviation))) {}

Var Embedding::lookup(const Tensor& ids) {
  return call([&](const Var&) { return lookup_ ? lookup_(ids, seen(weight)) : embedding(ids, seen(weight)); }, Var());
}

Var Embedding::project(const Var& x) {
  return call(
      [this](const Var& in) {
        WeightPacks* const packs = that_pay(packs_);
        return product_ ? product_(in, seen(weight), Var(), packs) : linear_by_rows(in, seen(weight), packs);
      },
      x);
}

Var Embedding::logits(const Var& x) {
  const Var all = project(x);
  const int64_t width = all.dim(all.shape().rank() - 1), rows = all.value().numel() / width;
  return reshape(all, {rows, width});
}

Loss Embedding::loss(const Var& x, const Tensor& targets, double scale) {
  if (loss_) return loss_(x, targets, scale);
  Loss out;
  out.mean = call(
      [&](const Var& in) {
        out = linear_cross_entropy(in, seen(weight), targets, scale, that_pay(packs_));
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
  return dropout(std::move(x), p_, tile);
}

Attention::Attention(int64_t channels, const Options& options)
    : qkv(child<Linear>("qkv", channels, 3 * channels, Linear::Options{})),
      proj(child<Linear>("proj", channels, channels, Linear::Options{.deviation = options.projection_deviation})),
      options_(options),
      head_dim_(options.heads > 0 ? channels / options.heads : 0) {
  if (options.heads <= 0 || channels % options.heads != 0)
    throw Error("[attention] " + std::to_string(options.heads) + " heads do not divide " + std::to_string(channels) +
                " channels");
  // A softmax does not see what is added to all of its inputs, and that is all that the bias of the keys does.
  qkv.parameter(*qkv.bias).vanishes = {channels, 2 * channels};
}

AttentionOptions Attention::at_step() {
  const StepInfo at = step();
  AttentionOptions o;
  o.first_head = at.first_head;
  o.heads_total = at.heads_total;
  o.tokens_total = at.tokens_total;
  if (options_.dropout == 0 || !at.training) return o;
  o.dropout = options_.dropout;
  o.random = Philox::named(at.seed, full_name());
  o.step = static_cast<uint64_t>(at.step);
  o.step_on_gpu = at.step_on_gpu;
  o.first_sequence = at.first_sequence;
  return o;
}

// The heads that are here are counted from what the projection gives.
Var Attention::forward(const Var& x) {
  const Var packed = qkv(x);
  return proj(core_(packed, packed.dim(2) / (3 * head_dim_), at_step()));
}

Tensor Attention::decode(const Tensor& x, KvCache& cache) {
  const NoGrad no_grad;
  const int64_t b = x.dim(0), t = x.dim(1), c = x.dim(2), heads = options_.heads;
  if (cache.length + t > cache.keys.dim(1))
    throw Error("[attention] " + std::to_string(cache.length + t) + " tokens do not fit a cache of " +
                std::to_string(cache.keys.dim(1)));
  const Tensor packed = qkv(Var(x)).value();
  const auto part = [&](int64_t i) { return packed.narrow(2, i * c, c).reshape({b, t, heads, c / heads}); };
  cache.keys.narrow(1, cache.length, t).copy_from(part(1));
  cache.values.narrow(1, cache.length, t).copy_from(part(2));
  cache.length += t;
  const Attended a = attention(part(0), cache.keys.narrow(1, 0, cache.length), cache.values.narrow(1, 0, cache.length));
  return proj(Var(a.out.reshape({b, t, c}))).value();
}

Mlp::Mlp(int64_t channels, double down_deviation, Recompute recompute)
    : up(child<Linear>("up", channels, 4 * channels,
                       Linear::Options{.activation = Activation::gelu, .recompute = recompute})),
      down(child<Linear>("down", 4 * channels, channels, Linear::Options{.deviation = down_deviation})),
      recompute_(recompute) {}

// One op where nothing comes between the layers, as the ranks of a tensor axis do.
Var Mlp::forward(const Var& x) {
  if (!up.is_plain() || !down.is_plain()) return down(up(x));
  return gelu_mlp(x, up.weights(), down.weights(), makes_gelu_again(recompute_));
}

}  // namespace tessera
