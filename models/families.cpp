// Tables of families and presets, and descriptors of a configuration.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/setting.h"
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
        .usual_adapters = "c_attn"},
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
        .feed_forward = {{"mlp.gate_up", {"mlp.gate_proj", "mlp.up_proj"}}, {"mlp.down", {"mlp.down_proj"}}}}}};
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

namespace {

struct Preset {
  std::string_view name;
  const ModelConfig& like;
  int64_t layers, heads, channels, context;
  int64_t kv_heads = 0, ffn = 0, vocab = 0;
  double theta = 10000;
};

constexpr ModelConfig kGpt2{};
constexpr ModelConfig kLlama{.family = Family::llama, .tied = false};
constexpr ModelConfig kQwen{.family = Family::llama, .tied = false, .norm_eps = 1e-6, .qkv_bias = true};
constexpr ModelConfig kTiedQwen{.family = Family::llama, .norm_eps = 1e-6, .qkv_bias = true};
constexpr ModelConfig kMixtral{.family = Family::llama, .tied = false, .experts = {.count = 8}};
constexpr ModelConfig kQwen3Moe{.family = Family::llama,
                                .tied = false,
                                .head_dim = 128,
                                .norm_eps = 1e-6,
                                .qk_norm = true,
                                .experts = {.count = 128, .per_token = 8}};

// GPT-2: Radford et al. 2019, table 2; GPT-3: Brown et al. 2020, table 2.1. Llama 2: Touvron et al. 2023, arXiv
// 2307.09288; Llama 3: Grattafiori et al. 2024, table 3; Qwen2.5: Yang et al. 2024, arXiv 2412.15115, table 1; Mistral
// 7B: version 0.2, without sliding window. nano and mini fit a laptop; llama's parameter counts are within 3% of gpt's,
// with grouped-query attention; moe-nano uses as many parameters per token as llama-nano. Mixtral: Jiang et al. 2024,
// arXiv 2401.04088, table 1; Qwen3: Yang et al. 2025, arXiv 2505.09388, table 2.
constexpr std::array<Preset, 23> kPresets{{{"gpt-nano", kGpt2, 4, 4, 128, 64},
                                           {"gpt-mini", kGpt2, 6, 6, 384, 256},
                                           {"gpt2", kGpt2, 12, 12, 768, 1024},
                                           {"gpt2-medium", kGpt2, 24, 16, 1024, 1024},
                                           {"gpt2-large", kGpt2, 36, 20, 1280, 1024},
                                           {"gpt2-xl", kGpt2, 48, 25, 1600, 1024},
                                           {"gpt3-175b", kGpt2, 96, 96, 12288, 2048},
                                           {"llama-nano", kLlama, 4, 4, 128, 64, 2, 384, 0, 10000},
                                           {"llama-mini", kLlama, 6, 6, 384, 256, 2, 1152, 0, 10000},
                                           {"llama2-7b", kLlama, 32, 32, 4096, 4096, 32, 11008, 32000, 10000},
                                           {"llama2-13b", kLlama, 40, 40, 5120, 4096, 40, 13824, 32000, 10000},
                                           {"llama2-70b", kLlama, 80, 64, 8192, 4096, 8, 28672, 32000, 10000},
                                           {"llama3-8b", kLlama, 32, 32, 4096, 8192, 8, 14336, 128256, 500000},
                                           {"llama3-70b", kLlama, 80, 64, 8192, 8192, 8, 28672, 128256, 500000},
                                           {"llama3-405b", kLlama, 126, 128, 16384, 8192, 8, 53248, 128256, 500000},
                                           {"qwen2.5-0.5b", kTiedQwen, 24, 14, 896, 32768, 2, 4864, 151936, 1e6},
                                           {"qwen2.5-1.5b", kTiedQwen, 28, 12, 1536, 32768, 2, 8960, 151936, 1e6},
                                           {"qwen2.5-3b", kTiedQwen, 36, 16, 2048, 32768, 2, 11008, 151936, 1e6},
                                           {"qwen2.5-7b", kQwen, 28, 28, 3584, 32768, 4, 18944, 152064, 1e6},
                                           {"mistral-7b", kLlama, 32, 32, 4096, 32768, 8, 14336, 32000, 1e6},
                                           {"moe-nano", kMixtral, 4, 4, 128, 64, 2, 192, 0, 10000},
                                           {"mixtral-8x7b", kMixtral, 32, 32, 4096, 32768, 8, 14336, 32000, 1e6},
                                           {"qwen3-30b-a3b", kQwen3Moe, 48, 32, 2048, 40960, 4, 768, 151936, 1e6}}};

}  // namespace

std::optional<ModelConfig> preset(std::string_view name) {
  const auto p = std::ranges::find(kPresets, name, &Preset::name);
  if (p == kPresets.end()) return {};
  ModelConfig c = p->like;
  c.layers = p->layers, c.heads = p->heads, c.channels = p->channels, c.context = p->context;
  c.kv_heads = p->kv_heads, c.ffn = p->ffn, c.vocab = p->vocab, c.rotary.theta = p->theta;
  return c;
}

std::string_view plain_preset(Family family) {
  return std::ranges::find(kPresets, family, [](const Preset& p) { return p.like.family; })->name;
}

const std::string& preset_names() {
  static const std::string all = [] {
    std::string out;
    for (const Preset& p : kPresets) out += (out.empty() ? "" : "|") + std::string(p.name);
    return out;
  }();
  return all;
}

namespace {

// Defaults to the preset's size; fixed by trained weights.
Field size(std::string_view name, std::string_view help, Bounds range = {}) {
  return Field{name, help, range}.follows().for_weights().for_identity(IdentityRole::unless_default);
}
Field of_llama(std::string_view name, std::string_view help, Bounds range = {}) {
  return size(name, help, range).with("family llama");
}
Field of_experts(std::string_view name, std::string_view help, Bounds range = {}) {
  return size(name, help, range).with("experts");
}
// May differ between a run and its initial weights.
Field of_routing(std::string_view name, std::string_view help) {
  return Field{name, help, {0, 1e6}}.follows().with("experts").for_identity(IdentityRole::unless_default);
}

void add_rotary(Settings& s, RotaryOptions& r) {
  const std::string_view bands = "rope_scaling llama3 yarn";
  s.add(r.theta, of_llama("rope_theta", "base of the rotary frequencies [10000]", {1, 1e12}));
  s.add(r.scaling, of_llama("rope_scaling", "scaling method of rotary positions for longer contexts"));
  s.add(r.factor, of_llama("rope_factor", "with `rope_scaling`: context extension factor [1]", {1, 1e6}));
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
  s.add(e.capacity, of_routing("expert_capacity",
                               "with `experts`: capacity factor: maximum load of an expert relative to a balanced "
                               "load, per sequence; excess tokens are dropped; 0: unlimited [0]"));
  s.add(e.softmax, of_experts("router_softmax",
                              "with `experts`: compute the routing weights as a softmax over the chosen experts or "
                              "over all experts [chosen]"));
  s.add(e.balance_loss, of_routing("balance_loss", "with `experts`: weight of the load-balancing loss [0.01]"));
  s.add(e.z_loss,
        of_routing("z_loss", "with `experts`: weight of the router z-loss, which penalizes large logits [0.001]"));
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
  s.add(c.window, of_llama("window", "sliding attention window in tokens; 0: unlimited [0]", {0, 1e9}));
  s.add(c.qkv_bias, of_llama("qkv_bias", "biases of q, k and v in the llama family, as in Qwen2"));
  s.add(c.proj_bias, of_llama("proj_bias", "bias of the attention output projection in the llama family"));
  s.add(c.mlp_bias, of_llama("mlp_bias", "biases of the feed-forward layers in the llama family"));
  s.add(c.qk_norm, of_llama("qk_norm", "normalize each head of q and k, as in Qwen3"));
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
