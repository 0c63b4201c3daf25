// The table of sizes.
#include "models/presets.h"

#include <array>

namespace tessera {
namespace {

struct Preset {
  std::string_view name;
  ModelConfig model;
};

constexpr ModelConfig gpt2(int64_t layers, int64_t heads, int64_t channels, int64_t context) {
  return {.layers = layers, .heads = heads, .channels = channels, .context = context, .vocab = 0};
}

// Of `heads` of queries that share `kv_heads` of keys and values.
struct LlamaSizes {
  int64_t layers, heads, kv_heads, channels, ffn, context, vocab;
  double theta;
};
constexpr ModelConfig llama(const LlamaSizes& s) {
  return {.family = Family::llama,
          .layers = s.layers,
          .heads = s.heads,
          .channels = s.channels,
          .context = s.context,
          .vocab = s.vocab,
          .tied = false,
          .kv_heads = s.kv_heads,
          .ffn = s.ffn,
          .rotary = {.theta = s.theta}};
}
constexpr ModelConfig qwen(const LlamaSizes& s, bool tied) {
  ModelConfig c = llama(s);
  c.tied = tied;
  c.norm_eps = 1e-6;
  c.qkv_bias = true;
  return c;
}

// Of experts `ffn` wide.
constexpr ModelConfig mixture(const LlamaSizes& s, int64_t experts, int64_t per_token) {
  ModelConfig c = llama(s);
  c.experts.count = experts;
  c.experts.per_token = per_token;
  return c;
}
constexpr ModelConfig qwen3_moe(const LlamaSizes& s, int64_t experts, int64_t per_token) {
  ModelConfig c = mixture(s, experts, per_token);
  c.head_dim = 128;
  c.norm_eps = 1e-6;
  c.qk_norm = true;
  return c;
}

// GPT-2: Radford et al. 2019, table 2; GPT-3: Brown et al. 2020, table 2.1. Llama 2: Touvron et al. 2023, arXiv
// 2307.09288; Llama 3: Grattafiori et al. 2024, table 3; Qwen2.5: Yang et al. 2024, arXiv 2412.15115, table 1; Mistral
// 7B: version 0.2, which has no sliding window. nano and mini are sizes for one laptop; those of Llama have the
// parameters of GPT's within 3%, their heads share; a token of moe-nano meets as many as one of llama-nano. Mixtral:
// Jiang et al. 2024, arXiv 2401.04088, table 1; Qwen3: Yang et al. 2025, arXiv 2505.09388, table 2.
constexpr std::array<Preset, 23> kPresets{
    {{"gpt-nano", gpt2(4, 4, 128, 64)},
     {"gpt-mini", gpt2(6, 6, 384, 256)},
     {"gpt2", gpt2(12, 12, 768, 1024)},
     {"gpt2-medium", gpt2(24, 16, 1024, 1024)},
     {"gpt2-large", gpt2(36, 20, 1280, 1024)},
     {"gpt2-xl", gpt2(48, 25, 1600, 1024)},
     {"gpt3-175b", gpt2(96, 96, 12288, 2048)},
     {"llama-nano", llama({4, 4, 2, 128, 384, 64, 0, 10000})},
     {"llama-mini", llama({6, 6, 2, 384, 1152, 256, 0, 10000})},
     {"llama2-7b", llama({32, 32, 32, 4096, 11008, 4096, 32000, 10000})},
     {"llama2-13b", llama({40, 40, 40, 5120, 13824, 4096, 32000, 10000})},
     {"llama2-70b", llama({80, 64, 8, 8192, 28672, 4096, 32000, 10000})},
     {"llama3-8b", llama({32, 32, 8, 4096, 14336, 8192, 128256, 500000})},
     {"llama3-70b", llama({80, 64, 8, 8192, 28672, 8192, 128256, 500000})},
     {"llama3-405b", llama({126, 128, 8, 16384, 53248, 8192, 128256, 500000})},
     {"qwen2.5-0.5b", qwen({24, 14, 2, 896, 4864, 32768, 151936, 1e6}, true)},
     {"qwen2.5-1.5b", qwen({28, 12, 2, 1536, 8960, 32768, 151936, 1e6}, true)},
     {"qwen2.5-3b", qwen({36, 16, 2, 2048, 11008, 32768, 151936, 1e6}, true)},
     {"qwen2.5-7b", qwen({28, 28, 4, 3584, 18944, 32768, 152064, 1e6}, false)},
     {"mistral-7b", llama({32, 32, 8, 4096, 14336, 32768, 32000, 1e6})},
     {"moe-nano", mixture({4, 4, 2, 128, 192, 64, 0, 10000}, 8, 2)},
     {"mixtral-8x7b", mixture({32, 32, 8, 4096, 14336, 32768, 32000, 1e6}, 8, 2)},
     {"qwen3-30b-a3b", qwen3_moe({48, 32, 4, 2048, 768, 40960, 151936, 1e6}, 128, 8)}}};

}  // namespace

std::optional<ModelConfig> preset(std::string_view name) {
  for (const Preset& p : kPresets)
    if (p.name == name) return p.model;
  return {};
}

const std::string& preset_names() {
  static const std::string all = [] {
    std::string out;
    for (const Preset& p : kPresets) out += (out.empty() ? "" : "|") + std::string(p.name);
    return out;
  }();
  return all;
}

}  // namespace tessera
