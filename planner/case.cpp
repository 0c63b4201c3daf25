// Parameter counts of a model shape, and validation of a case.
#include "planner/case.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <variant>

#include "base/error.h"
#include "models/families.h"
#include "models/layout.h"
#include "planner/pipeline.h"
#include "train/config.h"

namespace tessera::planner {

constexpr std::array<std::string_view, 3> kTensorOverlapNames = {"none", "backward", "all"};
constexpr std::array<std::string_view, 3> kReshardNames = {"always", "never", "auto"};
constexpr std::array<std::string_view, 2> kPositionNames = {"learned", "rope"};
static constexpr const auto& value_names(TensorOverlap) { return kTensorOverlapNames; }
static constexpr const auto& value_names(Reshard) { return kReshardNames; }
static constexpr const auto& value_names(Positions) { return kPositionNames; }

namespace {

constexpr double kPositive = std::numeric_limits<double>::min();

void divides(const char* field, int64_t divisor, const char* what, int64_t total) {
  if (total % divisor != 0)
    throw FieldError(field, fmt::format("{} does not divide {} {}; nearest valid value: {}", divisor, total, what,
                                        divisors_near(total, divisor)));
}

void check_ranges(const Settings& all) {
  for (const Setting& s : all) {
    const auto* integer = std::get_if<int64_t*>(&s.at);
    const auto* number = std::get_if<double*>(&s.at);
    if (!integer && !number) continue;
    const double value = integer ? real(**integer) : **number;
    const Bounds& range = s.field.range;
    if (value >= range.min && value <= range.max) continue;
    const std::string expected = !(value < range.min)     ? fmt::format("at most {}", range.max)
                                 : range.min == kPositive ? "more than 0"
                                                          : fmt::format("at least {}", range.min);
    throw FieldError(std::string(s.name), fmt::format("expected {}, got {}", expected, s.text()));
  }
}

}  // namespace

Settings field_descriptors(ModelShape& m) {
  return {
      {"layers", &m.layers, {}, Field{.range = {1, 1e5}}},
      {"channels", &m.channels, {}, Field{.range = {1, 1e6}}},
      {"heads", &m.heads, {}, Field{.range = {1, 1e6}}},
      {"kv_heads", &m.kv_heads, {}, Field{.range = {0, 1e6}}},
      {"head_dim", &m.head_dim, {}, Field{.range = {0, 1e6}}},
      {"ffn", &m.ffn, {}, Field{.range = {0, 1e7}}},
      {"experts", &m.experts.count, {}, Field{.range = {0}}},
      {"experts_per_token", &m.experts.per_token, {}, Field{.range = {0}}},
      {"gated", &m.gated},
      {"vocab", &m.vocab, {}, Field{.range = {1, 1e9}}},
      {"context", &m.context, {}, Field{.range = {1, 1e9}}},
      {"tied", &m.tied},
      {"positions", &m.encoding},
  };
}

Settings field_descriptors(Layout& l) {
  const Settings plan = field_descriptors(l.plan);
  const Bounds sizes{1, 1e6};
  Settings s;
  const auto add = [&](const char* name, Bounds range) {
    Setting one = plan.at(name);
    one.field.range = range;
    s.add(one);
  };
  for (const char* axis : {"dp", "tp", "pp", "cp"}) add(axis, sizes);
  s.add({"ep", &l.ep, {}, Field{.range = sizes}});
  s.add(plan.at("sp")), s.add(plan.at("zero"));
  s.add({"sequences", &l.sequences, {}, Field{.range = sizes}});
  add("microbatches", sizes);
  s.add(plan.at("schedule"));
  add("chunks", {0, 1e5});
  s.add(plan.at("recompute"));
  return s;
}

Settings field_descriptors(Hardware& h) {
  Settings s;
  const auto positive = [&](auto& value, std::string_view name) {
    s.add({name, &value, {}, Field{.range = {kPositive}}});
  };
  const auto fraction = [&](double& value, std::string_view name) {
    s.add({name, &value, {}, Field{.range = {kPositive, 1}}});
  };
  const auto maybe = [&](auto& value, std::string_view name) { s.add({name, &value, {}, Field{.range = {0}}}); };
  positive(h.peak_flops, "peak_flops"), positive(h.hbm_bytes_per_s, "hbm_bytes_per_s"),
      positive(h.memory_bytes, "memory_bytes");
  positive(h.multiprocessors, "multiprocessors"), positive(h.ranks_per_node, "ranks_per_node");
  positive(h.intra_bytes_per_s, "intra_bytes_per_s"), positive(h.inter_bytes_per_s, "inter_bytes_per_s");
  maybe(h.intra_latency_s, "intra_latency_s"), maybe(h.inter_latency_s, "inter_latency_s");
  maybe(h.launch_s, "launch_s"), maybe(h.reserved_bytes, "reserved_bytes"), maybe(h.cores, "processors");
  fraction(h.product_efficiency, "product_efficiency"), fraction(h.memory_efficiency, "memory_efficiency");
  fraction(h.intra_efficiency, "intra_efficiency"), fraction(h.inter_efficiency, "inter_efficiency");
  s.add({"contention", &h.contention, {}, Field{.range = {0, 1}}});
  positive(h.range_fastest, "range_fastest"), positive(h.range_slowest, "range_slowest");
  return s;
}

Settings field_descriptors(Software& w) {
  Settings s;
  const auto bytes = [&](double& value, std::string_view name) { s.add({name, &value, {}, Field{.range = {0}}}); };
  const auto add_field = [&](auto& value, std::string_view name) { s.add({name, &value}); };
  add_field(w.attention, "attention"), add_field(w.fused_elementwise, "fused_elementwise");
  bytes(w.parameter_bytes, "parameter_bytes"), bytes(w.gradient_bytes, "gradient_bytes");
  bytes(w.state_bytes, "state_bytes"), bytes(w.gather_bytes, "gather_bytes");
  bytes(w.reduce_bytes, "reduce_bytes"), bytes(w.logit_bytes, "logit_bytes");
  add_field(w.tp_overlap, "tp_overlap"), add_field(w.dp_overlap, "dp_overlap"), add_field(w.pp_overlap, "pp_overlap");
  add_field(w.scatter_messages, "scatter_messages"), add_field(w.dropout, "dropout"), add_field(w.fp8, "fp8");
  add_field(w.reshard_after_forward, "reshard_after_forward"), add_field(w.sums_after_pipeline, "sums_after_pipeline");
  add_field(w.message_buffers, "message_buffers"), add_field(w.fewer_layers_at_ends, "fewer_layers_at_ends");
  bytes(w.gated_activation_pieces, "gated_activation_pieces");
  return s;
}

void check(const Hardware& given) {
  Hardware h = given;
  check_ranges(field_descriptors(h));
  for (const auto& [kernel, rate] : h.attention)
    if (!(rate.flops > 0) || !std::isfinite(rate.flops) || !(rate.half_tokens >= 0) || !std::isfinite(rate.half_tokens))
      throw FieldError("attention_" + kernel + "_flops", fmt::format("expected more than 0, got {}", rate.flops));
  if (h.range_fastest > h.range_slowest)
    throw FieldError("range_fastest", fmt::format("expected at most {}, got {}", h.range_slowest, h.range_fastest));
}

void check(const Software& given) {
  Software s = given;
  check_ranges(field_descriptors(s));
}

ModelShape::ModelShape()
    : ModelConfig{.layers = 0, .heads = 0, .channels = 0, .context = 0, .vocab = 0, .experts = {.per_token = 0}} {}

ModelShape::ModelShape(const ModelConfig& config) : ModelConfig(config) {
  if (config.experts.count > 0 && config.experts.shared > 0)
    throw FieldError("shared_experts",
                     "not supported by predictions; expected 0, got " + std::to_string(config.experts.shared));
  const FamilyRow& row = find_row(family);
  gated = row.gated;
  encoding = row.rotary ? Positions::rope : Positions::learned;
  experts = {.count = experts.count, .per_token = experts.count > 0 ? experts.per_token : 0};
  dropout = 0;
  recompute = Recompute::none;
}

ModelConfig ModelShape::config() const {
  ModelConfig out = *this;
  out.family = gated ? Family::llama : Family::gpt2;
  return out;
}

double expert_parameters(const ModelShape& m) {
  return (m.gated ? 3 : 2) * real(m.channels) * real(m.hidden()) * real(std::max<int64_t>(1, m.experts.count));
}

double layer_matrices(const ModelShape& m) {
  const double h = real(m.channels), q = real(m.attended()), k = real(m.key());
  return h * (q + 2 * k) + q * h + expert_parameters(m);
}

double layer_parameters(const ModelShape& m) {
  const double h = real(m.channels), qkv = real(m.attended() + 2 * m.key()), f = real(m.hidden());
  double small = m.gated ? 2 * h + (m.qkv_bias ? qkv : 0) + (m.proj_bias ? h : 0) + (m.mlp_bias ? 2 * f + h : 0)
                         : 4 * h + qkv + h + (m.experts.count > 0 ? 0 : f + h);  // experts have no biases
  if (m.qk_norm) small += 2 * real(m.head_size());
  return layer_matrices(m) + small + h * real(m.experts.count);  // plus the router
}

double parameters(const ModelShape& m) {
  const double h = real(m.channels), v = real(m.vocab);
  return real(m.layers) * layer_parameters(m) + v * h * (m.tied ? 1 : 2) + real(m.learned()) * h +
         (m.gated ? 1 : 2) * h;
}

double active_parameters(const ModelShape& m) {
  if (m.experts.count == 0) return parameters(m);
  const double idle = 1 - real(m.experts.per_token) / real(m.experts.count);
  return parameters(m) - real(m.layers) * expert_parameters(m) * idle;
}

Case checked_case(const Case& given) {
  Case c = given;
  ModelShape& m = c.model;
  Plan& p = c.layout.plan;
  check_ranges(field_descriptors(m));
  if (m.head_dim == 0) divides("heads", m.heads, "channels", m.channels);
  divides("kv_heads", m.key_heads(), "heads", m.heads);
  if (m.experts.count > 0 && (m.experts.per_token < 1 || m.experts.per_token > m.experts.count))
    throw FieldError("experts_per_token",
                     fmt::format("expected 1 to {}, got {}", m.experts.count, m.experts.per_token));
  check_ranges(field_descriptors(c.layout));
  divides("tp", p.tp, "heads", m.heads), divides("tp", p.tp, "hidden channels", m.hidden());
  divides("cp", p.cp, "context tokens", m.context);
  constexpr int64_t kMaxRanks = 1 << 17;
  if (real(p.dp) * real(p.tp) * real(p.pp) * real(p.cp) > kMaxRanks)
    throw FieldError("dp", fmt::format("expected at most {} ranks in total", kMaxRanks));
  if (real(p.dp) * real(p.microbatches) * real(c.layout.sequences) * real(m.context) > 1e15)
    throw FieldError("sequences", "expected at most 1e15 tokens per step");
  if (c.layout.ep > 1 && m.experts.count == 0)
    throw FieldError("ep", fmt::format("expected 1 for a model without experts, got {}", c.layout.ep));
  if (c.layout.ep > 1) {
    divides("ep", c.layout.ep, "experts", m.experts.count);
    divides("ep", c.layout.ep, "dp x cp ranks", p.dp * p.cp);
  }
  if (p.recompute == Recompute::op && (c.software.name == "tessera" || m.experts.count > 0))
    throw FieldError("recompute", m.experts.count > 0
                                      ? "op is not supported for models with experts; use a different mode"
                                      : "op is supported only for other frameworks (`software`); use a different mode");
  if (p.schedule != ScheduleKind::interleaved && (p.chunks == 1 || p.pp == 1)) p.chunks = 0;
  if (const int64_t stages = std::ssize(rank_of_stages(p));
      stages > m.layers + (c.software.fewer_layers_at_ends ? 2 : 0))
    throw FieldError("pp",
                     fmt::format("{} stages for {} layers; expected at most one stage per layer", stages, m.layers));
  if (p.pp > 1 && p.schedule == ScheduleKind::interleaved && p.microbatches % p.pp != 0)
    throw FieldError("microbatches",
                     fmt::format("{} is not a multiple of {} pipeline ranks (interleaved); nearest valid value: {}",
                                 p.microbatches, p.pp, multiples_near(p.pp, p.microbatches)));
  check(c.hardware);
  check(c.software);
  return c;
}

}  // namespace tessera::planner
