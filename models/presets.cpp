// Sizes of published and of small models.
#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "models/config.h"

namespace tessera {

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

}  // namespace tessera
