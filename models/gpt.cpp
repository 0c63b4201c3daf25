// The forward passes of GPT-2.
#include "models/gpt.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "autograd/checkpoint.h"

namespace tessera {
namespace {

double residual_deviation(const GptConfig& c) { return 0.02 / std::sqrt(2.0 * static_cast<double>(c.layers)); }

}  // namespace

Block::Block(const GptConfig& c)
    : norm1(child<LayerNorm>("norm1", c.channels, c.recompute)),
      attn(child<Attention>("attn", c.channels, Attention::Options{c.heads, c.dropout, residual_deviation(c)})),
      norm2(child<LayerNorm>("norm2", c.channels, c.recompute)),
      mlp(child<Mlp>("mlp", c.channels, residual_deviation(c), c.recompute)),
      drop1(child<Dropout>("drop1", c.dropout)),
      drop2(child<Dropout>("drop2", c.dropout)),
      recompute_(c.recompute) {
  make_unit();
}

Var Block::forward(const Var& x) {
  if (recompute_ != Recompute::block || !grad_enabled()) return body(x);
  return checkpoint([this](const std::vector<Var>& in) { return body(in[0]); }, {x.tracked()});
}

Var Block::body(const Var& x) {
  Var branch = drop1.apply(attn(norm1(x)));
  auto [residual, normed] = norm2.add(x, std::move(branch));
  return add(residual, drop2.apply(mlp(normed)));
}

Tensor Block::decode(const Tensor& x, KvCache& cache) {
  const NoGrad no_grad;
  Var attended(attn.decode(norm1(Var(x)).value(), cache));
  const auto [residual, normed] = norm2.add(Var(x), std::move(attended));
  return add(residual, mlp(normed)).value();
}

std::vector<Block*> Gpt::make_blocks() {
  std::vector<Block*> made;
  for (int64_t i = 0; i < config.layers; ++i) made.push_back(&child<Block>("blocks." + std::to_string(i), config));
  return made;
}

Gpt::Gpt(const GptConfig& c)
    : config(c),
      tokens(child<Embedding>("tokens", c.vocab, c.channels)),
      positions(child<Embedding>("positions", c.context, c.channels)),
      drop(child<Dropout>("drop", c.dropout)),
      blocks(make_blocks()),
      norm(child<LayerNorm>("norm", c.channels)),
      head(make_head()) {
  tokens.make_unit();
  positions.make_unit();
  norm.make_unit();
}

// Tied to the token embedding, also where it is a copy of it.
Embedding& Gpt::make_head() {
  Parameter& table = tokens.parameter(tokens.weight);
  table.tie = table.name;
  if (config.tied) return tokens;
  Embedding& own = child<Embedding>("head", config.vocab, config.channels);
  own.parameter(own.weight).tie = table.name;
  own.make_unit();
  return own;
}

Var Gpt::look_up(const Tensor& ids, const Tensor& places) { return add(positions.lookup(places), tokens.lookup(ids)); }

Var Gpt::embed(const Tensor& ids) {
  if (ids.rank() != 2) throw Error("[gpt] ids are " + ids.describe() + "; expected int32 (B, T)");
  const StepInfo at = step();
  const int64_t t = ids.dim(1), total = std::max(t, at.tokens_total);
  if (total > config.context)
    throw Error("[gpt] " + std::to_string(total) + " tokens; the context is " + std::to_string(config.context));
  if (at.positions.empty()) return drop.apply(look_up(ids, Tensor::range(t, ids.arena())));
  const std::vector<int32_t> places(at.positions.begin(), at.positions.end());
  return drop.apply(look_up(ids, Tensor::constant<int32_t>(places, {t}, ids.arena())));
}

Var Gpt::hidden(const Tensor& ids) {
  Var x = embed(ids);
  for (Block* block : blocks) x = (*block)(x);
  return norm(x);
}

Var Gpt::logits(const Var& hidden_states) {
  Var all = head.project(hidden_states);
  const int64_t width = all.dim(2), rows = all.value().numel() / width;
  return reshape(all, {rows, width});
}

Loss Gpt::loss(const Tensor& ids, const Tensor& targets, double scale) {
  return head_loss(hidden(ids), targets, scale);
}

Loss Gpt::head_loss(const Var& hidden_states, const Tensor& targets, double scale) {
  return head.loss(hidden_states, targets.contiguous().reshape({-1}), scale);
}

std::vector<KvCache> Gpt::caches(int64_t batch) {
  const Tensor& like = tokens.weight.value();
  std::vector<KvCache> made(blocks.size());
  for (KvCache& cache : made) {
    const Shape shape{batch, config.context, config.heads, config.channels / config.heads};
    cache.keys = like.make(shape);
    cache.values = like.make(shape);
  }
  return made;
}

Tensor Gpt::decode(const Tensor& ids, std::vector<KvCache>& kv) {
  const NoGrad no_grad;
  const int64_t before = kv[0].length, t = ids.dim(1);
  if (before + t > config.context)
    throw Error("[gpt] " + std::to_string(before + t) + " tokens; the context is " + std::to_string(config.context));
  const Tensor places = Tensor::empty({t}, DType::int32, ids.arena()->host());
  std::iota(places.data<int32_t>(), places.data<int32_t>() + t, static_cast<int32_t>(before));
  Tensor x = look_up(ids, places.to(ids.arena())).value();
  for (size_t i = 0; i < blocks.size(); ++i) x = blocks[i]->decode(x, kv[i]);
  const Tensor last = x.narrow(1, t - 1, 1).contiguous();
  return logits(norm(Var(last))).value();
}

}  // namespace tessera
