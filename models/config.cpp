// Descriptors of a model's configuration.
#include "models/config.h"

#include <string_view>

#include "base/setting.h"
#include "models/families.h"

namespace tessera {

namespace {

// Defaults to the preset's size; fixed by trained weights.
Field size(Bounds range = {}, std::string_view goes_with = {}, IdentityRole same = IdentityRole::unless_default) {
  return {.range = range, .goes_with = goes_with, .open = true, .of_weights = true, .same = same};
}
constexpr const char *kOfLlama = "family llama", *kOfExperts = "experts";
// May differ between a run and its initial weights.
constexpr Field kRouting{
    .range = {0, 1e6}, .goes_with = kOfExperts, .open = true, .same = IdentityRole::unless_default};

void add_rotary(Settings& s, RotaryOptions& r) {
  const std::string_view bands = "rope_scaling llama3 yarn";
  s.add("Model",
        {{"rope_theta", &r.theta, "base of the rotary frequencies [10000]", size({1, 1e12}, kOfLlama)},
         {"rope_scaling", &r.scaling, "scaling method of rotary positions for longer contexts", size({}, kOfLlama)},
         {"rope_factor", &r.factor, "with `rope_scaling`: context extension factor [1]", size({1, 1e6}, kOfLlama)},
         {"rope_low_freq", &r.low_freq_factor,
          "with llama3 or yarn scaling: divide frequencies below this number of rotations per original context by "
          "`rope_factor` [1]",
          size({0, 1e6}, bands)},
         {"rope_high_freq", &r.high_freq_factor,
          "with llama3 or yarn scaling: retain frequencies above this number of rotations per original context [4, "
          "yarn: 32]",
          size({0, 1e6}, bands)},
         {"rope_original_context", &r.original_context,
          "with llama3 or yarn scaling: context length before scaling [8192]", size({1, 1e9}, bands)},
         {"rope_attention", &r.attention_factor,
          "with yarn scaling: scale factor of queries and keys [0.1 ln(`rope_factor`) + 1]",
          size({0, 1e6}, "rope_scaling yarn")}});
}

void add_experts(Settings& s, ExpertConfig& e) {
  s.add(
      "Model",
      {{"experts", &e.count, "number of experts that replace each feed-forward layer (mixture of experts); 0: none",
        size({0, 1e4})},
       {"experts_per_token", &e.per_token, "with `experts`: experts selected per token [2]",
        size({1, 1e4}, kOfExperts)},
       {"shared_experts", &e.shared,
        "with `experts`: width of a shared expert for all tokens, as a multiple of an expert's width [0]",
        size({0, 1e4}, kOfExperts)},
       {"expert_capacity", &e.capacity,
        "with `experts`: capacity factor: maximum load of an expert relative to a balanced load, per sequence; excess "
        "tokens are dropped; 0: unlimited [0]",
        kRouting},
       {"router_softmax", &e.softmax,
        "with `experts`: compute the routing weights as a softmax over the chosen experts or over all experts [chosen]",
        size({}, kOfExperts)},
       {"balance_loss", &e.balance_loss, "with `experts`: weight of the load-balancing loss [0.01]", kRouting},
       {"z_loss", &e.z_loss, "with `experts`: weight of the router z-loss, which penalizes large logits [0.001]",
        kRouting}});
}

void add_adapters(Settings& s, LoraConfig& l) {
  s.add(
      "Fine-tuning",
      {{"lora_rank", &l.rank, "train LoRA adapters of this rank on the frozen model of `init`; 0: train the full model",
        Field{.range = {0, 1e6}, .same = IdentityRole::unless_default}},
       {"lora_alpha", &l.alpha, "LoRA alpha; adapters are scaled by alpha / rank [`lora_rank`]",
        Field{.range = {0, 1e6}, .open = true}},
       {"lora_dropout", &l.dropout, "dropout probability of adapter inputs",
        Field{.range = {0, 1, true}, .same = IdentityRole::unless_default}},
       {"lora_rslora", &l.rank_stabilised, "scale adapters by alpha / sqrt(rank) (rsLoRA)"},
       {"lora_targets", &l.targets, "comma-separated layers with adapters, or all [q_proj,v_proj; gpt2: c_attn]",
        Field{.open = true, .same = IdentityRole::unless_default}}});
}

}  // namespace

ActivationOptions ModelConfig::activation() const {
  const bool gated = find_row(family).gated;
  return {.kind = gated ? Activation::silu : gelu, .gated = gated, .recompute = recomputes_activation(recompute)};
}

ModelConfig resolve_sizes(ModelConfig c) {
  c.kv_heads = c.all_heads().key, c.head_dim = c.head_size(), c.ffn = c.hidden();
  return c;
}

Settings field_descriptors(ModelConfig& c) {
  Settings s;
  s.add(
      "Model",
      {{"family", &c.family, "model family [the family of `model`]", size()},
       {"layers", &c.layers, "transformer blocks", size({1, 100000}, {}, IdentityRole::yes)},
       {"heads", &c.heads, "number of attention heads; must divide `channels`", size({1, 1e6}, {}, IdentityRole::yes)},
       {"kv_heads", &c.kv_heads, "number of key-value heads (grouped-query attention); must divide `heads`",
        size({1, 1e6})},
       {"head_dim", &c.head_dim, "channels of one head [`channels` / `heads`]", size({1, 1e6})},
       {"channels", &c.channels, "model width (hidden size)", size({1, 1e6}, {}, IdentityRole::yes)},
       {"ffn", &c.ffn, "hidden channels of a feed-forward layer or an expert [4 x `channels`]", size({1, 1e7})},
       {"context", &c.context, "context length in tokens",
        Field{.range = {1, 1e9}, .open = true, .same = IdentityRole::yes}},
       {"positions", &c.positions, "number of position embeddings (gpt2 family) [`context`]",
        Field{.range = {1, 1e9}, .goes_with = "family gpt2", .open = true, .same = IdentityRole::unless_default}},
       {"vocab", &c.vocab, "pad the tokenizer's vocabulary to this size", size({1, 1e9}, {}, IdentityRole::yes)},
       {"tied", &c.tied, "use a separate weight for the output head instead of the token embedding",
        Field{.denied = "untied", .open = true, .of_weights = true, .same = IdentityRole::unless_default}}});
  add_rotary(s, c.rotary);
  s.add("Model",
        {{"window", &c.window, "sliding attention window in tokens; 0: unlimited [0]", size({0, 1e9}, kOfLlama)},
         {"qkv_bias", &c.qkv_bias, "biases of q, k and v in the llama family, as in Qwen2", size({}, kOfLlama)},
         {"proj_bias", &c.proj_bias, "bias of the attention output projection in the llama family", size({}, kOfLlama)},
         {"mlp_bias", &c.mlp_bias, "biases of the feed-forward layers in the llama family", size({}, kOfLlama)},
         {"qk_norm", &c.qk_norm, "normalize each head of q and k, as in Qwen3", size({}, kOfLlama)},
         {"gelu", &c.gelu, "GELU of the gpt2 family: GPT-2's tanh approximation, or the exact function (erf) [tanh]",
          Field{.choices = "tanh|erf",
                .goes_with = "family gpt2",
                .open = true,
                .of_weights = true,
                .same = IdentityRole::unless_default}},
         {"norm_eps", &c.norm_eps, "epsilon of the norms [1e-5]", size({0, 1})}});
  add_experts(s, c.experts);
  s.add("Model", {{"dropout", &c.dropout, "dropout probability of activations",
                   Field{.range = {0, 1, true}, .same = IdentityRole::yes}}});
  add_adapters(s, c.lora);
  s.add("Fine-tuning", {{"quantize", &c.quantize.codec,
                         "4-bit format of frozen layer weights (QLoRA): nf4, or gptq for a model from `tessera "
                         "checkpoint quantize` [the format of `init`]",
                         Field{.open = true, .same = IdentityRole::unless_default}},
                        {"quantize_group", &c.quantize.group, "with gptq: columns per scale, -1 for full rows [128]",
                         Field{.range = {-1, 1e6}, .open = true, .same = IdentityRole::unless_default}}});
  return s;
}

}  // namespace tessera
