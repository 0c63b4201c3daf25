// The table of families, and models of a configuration.
#include "models/families.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "models/adapters/adapters.h"
#include "models/decoder.h"

namespace tessera {

const FamilyRow& find_row(Family family) {
  static const std::array<FamilyRow, kFamilyNames.size()> rows{
      {{.centered_norms = true,
        .rotary = false,
        .gated = false,
        .biases = true,
        .layers = "transformer.h",
        .optional_prefix = "transformer.",
        .derived = {".attn.bias", ".attn.masked_bias"},
        .transposed = true,
        .outside = {{"tokens.weight", {"transformer.wte.weight"}},
                    {"positions.weight", {"transformer.wpe.weight"}},
                    {"norm.weight", {"transformer.ln_f.weight"}},
                    {"norm.bias", {"transformer.ln_f.bias"}},
                    {"head.weight", {"lm_head.weight"}}},
        .norms = {{"norm1", {"ln_1"}}, {"norm2", {"ln_2"}}},
        .attention = {{"attn.qkv", {"attn.c_attn"}}, {"attn.proj", {"attn.c_proj"}}},
        .feed_forward = {{"mlp.up", {"mlp.c_fc"}}, {"mlp.down", {"mlp.c_proj"}}},
        .default_adapters = "c_attn"},
       {.optional_prefix = "model.",
        .derived = {".rotary_emb.inv_freq"},  // computed from the configuration
        .outside = {{"tokens.weight", {"model.embed_tokens.weight"}},
                    {"norm.weight", {"model.norm.weight"}},
                    {"head.weight", {"lm_head.weight"}}},
        .norms = {{"norm1", {"input_layernorm"}},
                  {"norm2", {"post_attention_layernorm"}},
                  {"attn.norm_q", {"self_attn.q_norm"}},
                  {"attn.norm_k", {"self_attn.k_norm"}}},
        .attention = {{"attn.qkv", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}},
                      {"attn.proj", {"self_attn.o_proj"}}},
        .feed_forward = {{"mlp.gate_up", {"mlp.gate_proj", "mlp.up_proj"}}, {"mlp.down", {"mlp.down_proj"}}},
        .experts = {{"mlp.router", {"block_sparse_moe.gate"}},
                    {"mlp.experts.gate_up", {"block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"}},
                    {"mlp.experts.down", {"block_sparse_moe.experts.{}.w2"}}},
        .normed_experts = {{"mlp.router", {"mlp.gate"}},
                           {"mlp.experts.gate_up", {"mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"}},
                           {"mlp.experts.down", {"mlp.experts.{}.down_proj"}}}}}};
  const auto i = static_cast<size_t>(family);
  if (i >= rows.size()) throw Error("[model] unknown family " + std::to_string(i));
  return rows[i];
}

const TensorNames* FamilyRow::find(std::string_view module) const {
  for (const std::vector<TensorNames>* names : {&norms, &attention, &feed_forward})
    if (const auto found = std::ranges::find(*names, module, &TensorNames::ours); found != names->end()) return &*found;
  return nullptr;
}

std::unique_ptr<LanguageModel> build_model(const ModelFactory& make, const ModelConfig& config) {
  if (!make) throw Error("[model] make: expected a callable that returns a model, got an empty std::function");
  std::unique_ptr<LanguageModel> model = make(config);
  require_object(model.get(), "[model] make: its result");
  return model;
}

std::unique_ptr<LanguageModel> make_model(const ModelConfig& config) {
  if (config.experts.count > 0 && config.quantize.codec != Codec::none)
    throw FieldError("quantize", "not supported with experts; expected 0 experts, got " +
                                     std::to_string(config.experts.count) + " of them");
  std::unique_ptr<LanguageModel> made = std::make_unique<Decoder>(config);
  attach_lora(*made);
  pack_layers(*made);
  return made;
}

}  // namespace tessera
