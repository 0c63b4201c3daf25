// Field by field; what is as in the first runs is left out.
#include "app/run_identity.h"

#include <fmt/format.h>

#include "train/names.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

// "7:3", of a mixture.
std::string shares_of(const Dataset& d) {
  std::string out;
  for (const MixturePart& p : d.parts) out += fmt::format("{}{}", out.empty() ? "" : ":", p.share);
  return out;
}

}  // namespace

Json run_identity(const TrainOptions& o, const ModelConfig& c, const Dataset& d) {
  Json out = {{"layers", c.layers},
              {"heads", c.heads},
              {"channels", c.channels},
              {"context", c.context},
              {"vocab", c.vocab},
              {"dropout", c.dropout},
              {"dtype", o.dtype},
              {"batch", o.batch},
              {"optimizer", o.optimizer},
              {"seed", o.seed},
              {"tokenizer", d.tokenizer->kind()}};
  for (const auto& [name, sum] : d.checksums()) out[name] = sum;
  // Where they are not as in the first runs, whose manifests do not name them.
  const auto add = [&](const char* name, const auto& found, const auto& usual) {
    if (found != usual) out[name] = found;
  };
  const ModelConfig plain;
  const RotaryOptions &r = c.rotary, &usual = plain.rotary;
  add("family", text_of(c.family), text_of(plain.family));
  add("kv_heads", c.all_heads().key, c.heads);
  add("head_dim", c.head_size(), c.channels / c.heads);
  add("ffn", c.hidden(), 4 * c.channels);
  add("tied", c.tied, plain.tied);
  add("norm_eps", c.norm_eps, plain.norm_eps);
  add("qkv_bias", c.qkv_bias, plain.qkv_bias);
  add("qk_norm", c.qk_norm, plain.qk_norm);
  add("rope_theta", r.theta, usual.theta);
  add("rope_scaling", text_of(r.scaling), text_of(usual.scaling));
  add("rope_factor", r.factor, usual.factor);
  add("rope_low_freq", r.low_freq_factor, usual.low_freq_factor);
  add("rope_high_freq", r.high_freq_factor, usual.high_freq_factor);
  add("rope_original_context", r.original_context, usual.original_context);
  add("lora_rank", c.lora.rank, plain.lora.rank);
  add("lora_scale", c.lora.rank > 0 ? c.lora.scale() : 0, 0.0);
  add("lora_dropout", c.lora.dropout, plain.lora.dropout);
  add("lora_targets", c.lora.targets, plain.lora.targets);
  const ExpertConfig &e = c.experts, none;
  add("experts", e.count, none.count);
  if (e.count > 0) {
    add("experts_per_token", e.per_token, none.per_token);
    add("shared_experts", e.shared, none.shared);
    add("expert_capacity", e.capacity, none.capacity);
    add("router_softmax", text_of(e.softmax), text_of(none.softmax));
    add("balance_loss", e.balance_loss, none.balance_loss);
    add("z_loss", e.z_loss, none.z_loss);
  }
  add("quantize", text_of(c.quantize.codec), text_of(plain.quantize.codec));
  add("quantize_group", c.quantize.group, plain.quantize.group);
  add("shuffle", o.shuffle, false);
  add("mixture", shares_of(d), std::string());
  add("state_dtype", o.state_dtype, TrainOptions().state_dtype);
  add("document_mask", o.document_mask || o.pack, false);
  return out;
}

}  // namespace tessera
