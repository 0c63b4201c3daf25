// Configuration of a model: its family, sizes and options.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/setting.h"
#include "nn/experts/experts.h"
#include "tensor/ops/quantize/quantize.h"

namespace tessera {

enum class Family : uint8_t { gpt2, llama };
constexpr std::array<std::string_view, 2> kFamilyNames = {"gpt2", "llama"};
constexpr const auto& value_names(Family) { return kFamilyNames; }

struct LoraConfig {
  int64_t rank = 0;  // 0: none
  double alpha = 0, dropout = 0;
  bool rank_stabilised = false;           // alpha / sqrt(rank) in place of alpha / rank (Kalajdzievski 2023)
  std::vector<std::string> targets = {};  // names of linear layers
  bool starts_idle = true;                // initially the adapted model equals the base model

  double scale() const {
    return alpha / (rank_stabilised ? std::sqrt(static_cast<double>(rank)) : static_cast<double>(rank));
  }
  bool operator==(const LoraConfig&) const = default;
};

// 4-bit weights of linear layers (models/adapters/adapters.h).
struct QuantizeConfig {
  Codec codec = Codec::none;
  int64_t group = 128;  // gptq: columns per scale; -1: the full row
  bool operator==(const QuantizeConfig&) const = default;
};

// Twice the mean number of keys per query, over `context` tokens or the last `window` (0: all).
inline double visible_keys(int64_t context, int64_t window) {
  const auto t = static_cast<double>(context), w = window > 0 ? std::min(static_cast<double>(window), t) : t;
  return w * (2 - w / t);
}

struct ModelConfig {
  Family family = Family::gpt2;  // ignored by custom models
  int64_t layers = 4, heads = 4, channels = 128, context = 64, vocab = 256;
  double dropout = 0;
  Recompute recompute = Recompute::none;
  bool tied = true;         // the head shares the token embedding
  bool tie_copies = false;  // each use of a tied weight has a separate copy (Parameter::tie)
  int64_t kv_heads = 0;     // 0: heads
  int64_t head_dim = 0;     // 0: channels / heads
  int64_t ffn = 0;          // hidden channels of feed-forward layers; 0: 4 channels
  int64_t positions = 0;    // rows of the position embedding; 0: the context
  double norm_eps = 1e-5;
  Activation gelu = Activation::gelu;  // of ungated feed-forward layers: gelu or gelu_erf
  // Only with rotary positions:
  RotaryOptions rotary = {};
  int64_t window = 0;         // attention window in tokens; 0: unlimited
  bool qkv_bias = false;      // bias of q, k and v
  bool proj_bias = false;     // bias of the attention output projection
  bool mlp_bias = false;      // bias of both layers of a gated MLP
  bool qk_norm = false;       // normalizes each head of q and k
  ExpertConfig experts = {};  // replace the feed-forward layers, each `ffn` wide
  LoraConfig lora = {};
  QuantizeConfig quantize = {};
  bool full_matrix_updates = false;  // the optimizer needs full matrices of layers (Parameter::full_matrix_update)

  int64_t key_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  Heads all_heads() const { return {heads, key_heads()}; }
  int64_t head_size() const { return head_dim > 0 ? head_dim : channels / heads; }
  int64_t attended() const { return heads * head_size(); }  // channels of q and of the attention output
  int64_t hidden() const { return ffn > 0 ? ffn : 4 * channels; }
  int64_t position_rows() const { return positions > 0 ? positions : context; }
  double keys() const { return visible_keys(context, window); }
  ActivationOptions activation() const;  // of feed-forward layers and experts
  // For projections onto the residual stream: GPT-2's 0.02 / sqrt(2 layers).
  double residual_deviation() const { return 0.02 / std::sqrt(2.0 * static_cast<double>(layers)); }
};

// Names of enum values for the command line, JSON and messages (base/setting.h).
constexpr std::array<std::string_view, 2> kRouterSoftmaxNames = {"chosen", "all"};
constexpr std::array<std::string_view, 4> kRopeScalingNames = {"none", "linear", "llama3", "yarn"};
constexpr std::array<std::string_view, 3> kActivationNames = {"tanh", "erf", "silu"};
constexpr std::array<std::string_view, 3> kCodecNames = {"none", "nf4", "gptq"};

constexpr const auto& value_names(RouterSoftmax) { return kRouterSoftmaxNames; }
constexpr const auto& value_names(RopeScaling) { return kRopeScalingNames; }
constexpr const auto& value_names(Activation) { return kActivationNames; }
constexpr const auto& value_names(Codec) { return kCodecNames; }

Settings field_descriptors(ModelConfig& config);
ModelConfig resolve_sizes(ModelConfig config);

// Sizes as in the models' papers and published files; a vocabulary of 0 means the tokenizer's.
std::optional<ModelConfig> preset(std::string_view name);
std::string_view plain_preset(Family family);  // the family's first preset
// "gpt-nano|gpt-mini|...", in the order of the table.
const std::string& preset_names();

}  // namespace tessera
