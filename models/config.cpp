// Descriptors of a model's configuration.
#include "models/config.h"

#include <string_view>

#include "base/setting.h"
#include "models/families.h"

namespace tessera {

namespace {

// Defaults to the preset's size; fixed by trained weights.
Field size(std::string_view name, std::string_view help, Bounds range = {}) {
  return Field{name, help, range}.follows().for_weights().for_identity(IdentityRole::unless_default);
}
Field llama_field(std::string_view name, std::string_view help, Bounds range = {}) {
  return size(name, help, range).with("family llama");
}
Field of_experts(std::string_view name, std::string_view help, Bounds range = {}) {
  return size(name, help, range).with("experts");
}
// May differ between a run and its initial weights.
Field routing_field(std::string_view name, std::string_view help) {
  return Field{name, help, {0, 1e6}}.follows().with("experts").for_identity(IdentityRole::unless_default);
}

void add_rotary(Settings& s, RotaryOptions& r) {
  const std::string_view bands = "rope_scaling llama3 yarn";
  s.add(r.theta, llama_field("rope_theta", "base of the rotary frequencies [10000]", {1, 1e12}));
  s.add(r.scaling, llama_field("rope_scaling", "scaling method of rotary positions for longer contexts"));
  s.add(r.factor, llama_field("rope_factor", "with `rope_scaling`: context extension factor [1]", {1, 1e6}));
  s.add(r.low_freq_factor, size("rope_low_freq",
                                "with llama3 or yarn scaling: divide frequencies below this number of rotations per "
                                "original context by `rope_factor` [1]",
                                {0, 1e6})
                               .with(bands));
  s.add(r.high_freq_factor, size("rope_high_freq",
                                 "with llama3 or yarn scaling: retain frequencies above this number of rotations per "
                                 "original context [4, yarn: 32]",
                                 {0, 1e6})
                                .with(bands));
  s.add(r.original_context,
        size("rope_original_context", "with llama3 or yarn scaling: context length before scaling [8192]", {1, 1e9})
            .with(bands));
  s.add(r.attention_factor,
        size("rope_attention", "with yarn scaling: scale factor of queries and keys [0.1 ln(`rope_factor`) + 1]",
             {0, 1e6})
            .with("rope_scaling yarn"));
}

void add_experts(Settings& s, ExpertConfig& e) {
  s.add(e.count, size("experts", "number of experts that replace each feed-forward layer (mixture of experts); 0: none",
                      {0, 1e4}));
  s.add(e.per_token, of_experts("experts_per_token", "with `experts`: experts selected per token [2]", {1, 1e4}));
  s.add(e.shared,
        of_experts("shared_experts",
                   "with `experts`: width of a shared expert for all tokens, as a multiple of an expert's width [0]",
                   {0, 1e4}));
  s.add(e.capacity, routing_field("expert_capacity",
                                  "with `experts`: capacity factor: maximum load of an expert relative to a balanced "
                                  "load, per sequence; excess tokens are dropped; 0: unlimited [0]"));
  s.add(e.softmax, of_experts("router_softmax",
                              "with `experts`: compute the routing weights as a softmax over the chosen experts or "
                              "over all experts [chosen]"));
  s.add(e.balance_loss, routing_field("balance_loss", "with `experts`: weight of the load-balancing loss [0.01]"));
  s.add(e.z_loss,
        routing_field("z_loss", "with `experts`: weight of the router z-loss, which penalizes large logits [0.001]"));
}

void add_adapters(Settings& s, LoraConfig& l) {
  s.add(l.rank, {"lora_rank",
                 "train LoRA adapters of this rank on the frozen model of `init`; 0: train the full "
                 "model",
                 {0, 1e6}})
      .for_identity(IdentityRole::unless_default);
  s.add(l.alpha, {"lora_alpha", "LoRA alpha; adapters are scaled by alpha / rank [`lora_rank`]", {0, 1e6}}).follows();
  s.add(l.dropout, {"lora_dropout", "dropout probability of adapter inputs", {0, 1, true}})
      .for_identity(IdentityRole::unless_default);
  s.add(l.rank_stabilised, {"lora_rslora", "scale adapters by alpha / sqrt(rank) (rsLoRA)"});
  s.add(l.targets, {"lora_targets", "comma-separated layers with adapters, or all [q_proj,v_proj; gpt2: c_attn]"})
      .follows()
      .for_identity(IdentityRole::unless_default);
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
  s.group("Model");
  s.add(c.family, size("family", "model family [the family of `model`]"));
  s.add(c.layers, size("layers", "transformer blocks", {1, 100000}).for_identity(IdentityRole::yes));
  s.add(c.heads,
        size("heads", "number of attention heads; must divide `channels`", {1, 1e6}).for_identity(IdentityRole::yes));
  s.add(c.kv_heads,
        size("kv_heads", "number of key-value heads (grouped-query attention); must divide `heads`", {1, 1e6}));
  s.add(c.head_dim, size("head_dim", "channels of one head [`channels` / `heads`]", {1, 1e6}));
  s.add(c.channels, size("channels", "model width (hidden size)", {1, 1e6}).for_identity(IdentityRole::yes));
  s.add(c.ffn, size("ffn", "hidden channels of a feed-forward layer or an expert [4 x `channels`]", {1, 1e7}));
  s.add(c.context, {"context", "context length in tokens", {1, 1e9}}).follows().for_identity(IdentityRole::yes);
  s.add(c.positions, {"positions", "number of position embeddings (gpt2 family) [`context`]", {1, 1e9}})
      .follows()
      .with("family gpt2")
      .for_identity(IdentityRole::unless_default);
  s.add(c.vocab,
        size("vocab", "pad the tokenizer's vocabulary to this size", {1, 1e9}).for_identity(IdentityRole::yes));
  s.add(c.tied,
        size("tied", "use a separate weight for the output head instead of the token embedding").unless("untied"));
  add_rotary(s, c.rotary);
  s.add(c.window, llama_field("window", "sliding attention window in tokens; 0: unlimited [0]", {0, 1e9}));
  s.add(c.qkv_bias, llama_field("qkv_bias", "biases of q, k and v in the llama family, as in Qwen2"));
  s.add(c.proj_bias, llama_field("proj_bias", "bias of the attention output projection in the llama family"));
  s.add(c.mlp_bias, llama_field("mlp_bias", "biases of the feed-forward layers in the llama family"));
  s.add(c.qk_norm, llama_field("qk_norm", "normalize each head of q and k, as in Qwen3"));
  s.add(c.gelu, size("gelu", "GELU of the gpt2 family: GPT-2's tanh approximation, or the exact function (erf) [tanh]")
                    .of("tanh|erf")
                    .with("family gpt2"));
  s.add(c.norm_eps, size("norm_eps", "epsilon of the norms [1e-5]", {0, 1}));
  add_experts(s, c.experts);
  s.add(c.dropout, {"dropout", "dropout probability of activations", {0, 1, true}}).for_identity(IdentityRole::yes);
  s.group("Fine-tuning");
  add_adapters(s, c.lora);
  s.add(c.quantize.codec, {"quantize",
                           "4-bit format of frozen layer weights (QLoRA): nf4, or gptq for a model from `tessera "
                           "checkpoint quantize` [the format of `init`]"})
      .follows()
      .for_identity(IdentityRole::unless_default);
  s.add(c.quantize.group, {"quantize_group", "with gptq: columns per scale, -1 for full rows [128]", {-1, 1e6}})
      .follows()
      .for_identity(IdentityRole::unless_default);
  return s;
}

}  // namespace tessera
