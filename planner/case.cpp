// Sizes of a model from its shape, and whether a case can be at all.
#include "planner/case.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "models/layout.h"
#include "planner/pipeline.h"
#include "tensor/error.h"

namespace tessera::planner {
namespace {

void positive(const char* field, int64_t value, int64_t most) {
  if (value < 1 || value > most) throw FieldError(field, fmt::format("expected 1 to {}, found {}", most, value));
}

void divides(const char* field, int64_t part, const char* what, int64_t whole) {
  if (whole % part != 0)
    throw FieldError(field,
                     fmt::format("{} do not divide {} {}; {} do", part, whole, what, divisors_near(whole, part)));
}

}  // namespace

ModelShape shape_of(const ModelConfig& c) {
  if (c.experts.count > 0 && c.experts.shared > 0)
    throw FieldError("shared_experts",
                     "predictions do not know them; expected 0, found " + std::to_string(c.experts.shared));
  const FamilyRow& family = row_of(c.family);
  return {.layers = c.layers,
          .channels = c.channels,
          .heads = c.heads,
          .kv_heads = c.kv_heads,
          .head_dim = c.head_dim,
          .ffn = c.ffn,
          .experts = c.experts.count,
          .experts_per_token = c.experts.count > 0 ? c.experts.per_token : 0,
          .gated = family.gated,
          .vocab = c.vocab,
          .context = c.context,
          .tied = c.tied,
          .positions = family.rotary ? Positions::rope : Positions::learned,
          .qkv_bias = c.qkv_bias,
          .qk_norm = c.qk_norm};
}

ModelConfig config_of(const ModelShape& m) {
  ModelConfig config{.family = m.gated ? Family::llama : Family::gpt2,
                     .layers = m.layers,
                     .heads = m.heads,
                     .channels = m.channels,
                     .context = m.context,
                     .vocab = m.vocab,
                     .tied = m.tied,
                     .kv_heads = m.kv_heads,
                     .head_dim = m.head_dim,
                     .ffn = m.ffn,
                     .qkv_bias = m.qkv_bias,
                     .qk_norm = m.qk_norm};
  config.experts.count = m.experts;
  if (m.experts > 0) config.experts.per_token = m.experts_per_token;
  return config;
}

double expert_parameters(const ModelShape& m) {
  return (m.gated ? 3 : 2) * real(m.channels) * real(m.hidden()) * real(std::max<int64_t>(1, m.experts));
}

double layer_matrices(const ModelShape& m) {
  const double h = real(m.channels), q = real(m.query()), k = real(m.key());
  return h * (q + 2 * k) + q * h + expert_parameters(m);
}

double layer_parameters(const ModelShape& m) {
  const double h = real(m.channels), qkv = real(m.query() + 2 * m.key()), f = real(m.hidden());
  double small = m.gated ? 2 * h + (m.qkv_bias ? qkv : 0)
                         : 4 * h + qkv + h + (m.experts > 0 ? 0 : f + h);  // experts have no biases
  if (m.qk_norm) small += 2 * real(m.head_size());
  return layer_matrices(m) + small + h * real(m.experts);  // with the router
}

double parameters(const ModelShape& m) {
  const double h = real(m.channels), v = real(m.vocab);
  return real(m.layers) * layer_parameters(m) + v * h * (m.tied ? 1 : 2) +
         (m.positions == Positions::learned ? real(m.context) * h : 0) + (m.gated ? 1 : 2) * h;
}

double active_parameters(const ModelShape& m) {
  if (m.experts == 0) return parameters(m);
  const double idle = 1 - real(m.experts_per_token) / real(m.experts);
  return parameters(m) - real(m.layers) * expert_parameters(m) * idle;
}

Case checked_case(const Case& given) {
  Case c = given;
  ModelShape& m = c.model;
  Plan& p = c.layout.plan;
  constexpr int64_t kMost = 1'000'000, kMany = 1'000'000'000;
  positive("layers", m.layers, 100'000), positive("channels", m.channels, kMost), positive("heads", m.heads, kMost);
  positive("context", m.context, kMany), positive("vocab", m.vocab, kMany);
  positive("kv_heads", m.key_heads(), kMost), positive("ffn", m.hidden(), 10'000'000);
  if (m.head_dim == 0) divides("heads", m.heads, "channels", m.channels);
  positive("head_dim", m.head_size(), kMost);
  divides("kv_heads", m.key_heads(), "heads", m.heads);
  if (m.experts > 0) positive("experts_per_token", m.experts_per_token, m.experts);
  positive("dp", p.dp, kMost), positive("tp", p.tp, kMost), positive("pp", p.pp, kMost), positive("cp", p.cp, kMost);
  positive("ep", c.layout.ep, kMost), positive("microbatches", p.microbatches, kMost);
  positive("sequences", c.layout.sequences, kMost);
  divides("tp", p.tp, "heads", m.heads), divides("tp", p.tp, "hidden channels", m.hidden());
  divides("cp", p.cp, "tokens of the context", m.context);
  constexpr int64_t kMostRanks = 1 << 17;
  if (real(p.dp) * real(p.tp) * real(p.pp) * real(p.cp) > kMostRanks)
    throw FieldError("dp", fmt::format("expected at most {} ranks of all axes", kMostRanks));
  if (real(p.dp) * real(p.microbatches) * real(c.layout.sequences) * real(m.context) > 1e15)
    throw FieldError("sequences", "expected at most 1e15 tokens in a step");
  if (c.layout.ep > 1 && m.experts == 0)
    throw FieldError("ep", fmt::format("expected 1 without experts, found {}", c.layout.ep));
  if (c.layout.ep > 1) {
    divides("ep", c.layout.ep, "experts", m.experts);
    divides("ep", c.layout.ep, "ranks of dp x cp", p.dp * p.cp);
  }
  if (p.schedule != ScheduleKind::interleaved && (p.chunks == 1 || p.pp == 1)) p.chunks = 0;
  if (const int64_t stages = std::ssize(rank_of_stages(p));
      stages > m.layers + (c.software.fewer_layers_at_ends ? 2 : 0))
    throw FieldError("pp",
                     fmt::format("{} stages for {} layers; expected at most one for each layer", stages, m.layers));
  if (p.pp > 1 && p.schedule == ScheduleKind::interleaved && p.microbatches % p.pp != 0)
    throw FieldError("microbatches",
                     fmt::format("{} are no multiple of {} pipeline ranks, as interleaved needs; {} are",
                                 p.microbatches, p.pp, multiples_near(p.pp, p.microbatches)));
  check(c.hardware);
  check(c.software);
  return c;
}

}  // namespace tessera::planner
