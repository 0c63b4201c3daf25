// Language-model interface for pipelines, the oracle, generation, and FLOP and byte counts.
//
//   ids --embed--> x --layer 0--> x --layer 1--> ... --finish--> hidden --loss--> loss      x, hidden: (B, T, C)
//
// A model declares its modules in this order: modules before the layers belong to the first pipeline stage, modules
// after them to the last.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "nn/experts/experts.h"
#include "tensor/ops/quantize/quantize.h"

namespace tessera {

// --- model families (models/families.cpp) ---

enum class Family : uint8_t { gpt2, llama };
constexpr std::array<std::string_view, 2> kFamilyNames = {"gpt2", "llama"};
constexpr const auto& value_names(Family) { return kFamilyNames; }

// A parameter, or a module within a layer, and the tensors whose rows are concatenated in it: one; gate and up; or q, k
// and v. {} denotes an expert's index.
struct TensorNames {
  std::string_view ours;
  std::vector<std::string_view> theirs;
};

struct FamilyRow {
  bool centered_norms = false;  // LayerNorm, else RMSNorm
  bool rotary = true;           // rotary embeddings of q and k, else learned position embeddings
  bool gated = true;            // SwiGLU, else GELU
  bool biases = false;          // on every linear layer

  std::string_view layers = "model.layers";                                // prefix of layer indices
  std::string_view optional_prefix = {};                                   // may be absent in published files
  std::vector<std::string_view> derived = {};                              // suffixes of non-parameter tensors in files
  bool transposed = false;                                                 // layers' matrices are stored as (in, out)
  std::vector<TensorNames> outside = {};                                   // parameters outside of layers
  std::vector<TensorNames> norms = {}, attention = {}, feed_forward = {};  // in a layer; the last two support adapters

  std::string_view usual_adapters = "q_proj,v_proj";

  // Null if the module has no entry.
  const TensorNames* find(std::string_view module) const;
};
const FamilyRow& find_row(Family family);

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
  bool whole_updates = false;  // the optimizer needs full matrices of layers (Parameter::full_matrix_update)

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

template <class Enum>
constexpr std::string_view value_name(Enum value) {
  return name_in(value_names(value), value);
}

class Settings;
Settings field_descriptors(ModelConfig& config);
ModelConfig resolve_sizes(ModelConfig config);

// (B, T, C) -> (B, T, C). Recompute::block reruns its forward pass in the backward pass.
class DecoderLayer : public Module {
 public:
  // Appends new tokens (B, T, C) of B texts to their KV caches. Returns only the last `answers` tokens, (B, answers,
  // C). No gradient. The default throws Error.
  virtual Tensor decode(const Tensor& x, std::span<KvCache* const> texts, int64_t answers);
};

using TextCache = std::vector<KvCache>;  // by layer

struct ModelAxes;  // models/layout.h

class LanguageModel : public Module {
 public:
  const ModelConfig config;

  // --- model definition ---
  virtual Var embed(const Tensor& ids) = 0;  // int32 (B, T), tokens at step().positions
  virtual DecoderLayer& layer(int64_t i) = 0;
  virtual Var finish(const Var& x) { return x; }
  virtual Var logits(const Var& hidden) = 0;  // (B, T, C) -> (B T, V)
  // targets int32 of any shape; `scale` as in cross_entropy().
  virtual Loss head_loss(const Var& hidden, const Tensor& targets, double scale);
  // Partitions the model over axes of size > 1, before materialization. The default throws FieldError: such a model
  // trains only with dp, ZeRO and pp.
  virtual void place(const ModelAxes& axes);

  // --- derived operations ---
  // embed(), recorded in the graph even if only layers are trained.
  Var embedded(const Tensor& ids);
  Var hidden(const Tensor& ids);  // int32 (B, T) -> (B, T, C)
  Loss loss(const Tensor& ids, const Tensor& targets, double scale);

  // Decoding without gradients: logits (B, V) for the token after the last of `ids` (B, T), which continue the B cached
  // texts. Leaves set_step() in inference mode.
  TextCache cache(int64_t capacity) const { return TextCache(static_cast<size_t>(config.layers), KvCache{capacity}); }
  TextCache cache() const { return cache(config.context); }
  Tensor decode(const Tensor& ids, std::span<TextCache* const> texts);
  Tensor decode(const Tensor& ids, TextCache& text) { return decode(ids, std::array{&text}); }
  // Stages of decode() on ranks with only some layers: embeddings (B, T, C), after set_step() to the tokens' positions;
  // a layer; and logits (B, V) of the last token, or this rank's columns of them.
  Tensor decode_first(const Tensor& ids, std::span<TextCache* const> texts);
  Tensor decode_layer(int64_t i, const Tensor& x, std::span<TextCache* const> texts);
  Tensor decode_last(const Tensor& x);
  StepInfo decode_step(int64_t tokens, std::span<TextCache* const> texts, const ArenaPtr& arena) const;

  // Layer index per unit of layout(): -1 before the layers, config.layers after them.
  std::vector<int64_t> layers_of_units();
  // Forward FLOPs per token: two per element of each used matrix, and causal attention.
  double layer_flops(int64_t i);
  double head_flops() const { return 2 * static_cast<double>(config.channels) * static_cast<double>(config.vocab); }
  // Training FLOPs per token, 6 N + 12 L C T (Chowdhery et al. 2022, appendix B), with 4 N for frozen parameters. N
  // excludes unselected experts and embedding lookups.
  double training_flops();

 protected:
  explicit LanguageModel(const ModelConfig& c) : config(c) {}
  template <class M, class... Args>
  M& child(const std::string& name, Args&&... args) {
    M& made = Module::child<M>(name, std::forward<Args>(args)...);
    made.make_unit();
    if (std::is_base_of_v<DecoderLayer, M> && config.recompute == Recompute::block) recompute(made);
    if (std::is_base_of_v<DecoderLayer, M> && config.whole_updates) mark_matrices(made);
    return made;
  }
  // The token embedding itself if tied, else (or with a copy per use) a separate unit.
  Embedding& make_head(Embedding& tokens);

 private:
  static void recompute(Module& layer);
  static void mark_matrices(Module& layer);
  int64_t idle_elements(int64_t i);  // elements of unselected experts per token in layer i
};

using ModelFactory = std::function<std::unique_ptr<LanguageModel>(const ModelConfig&)>;
// Throws Error if `make` is empty or returns null.
std::unique_ptr<LanguageModel> build_model(const ModelFactory& make, const ModelConfig& config);

std::unique_ptr<LanguageModel> make_model(const ModelConfig& config);

// Sizes as in the models' papers and published files; a vocabulary of 0 means the tokenizer's.
std::optional<ModelConfig> preset(std::string_view name);
std::string_view plain_preset(Family family);  // the family's first preset
// "gpt-nano|gpt-mini|...", in the order of the table.
const std::string& preset_names();

}  // namespace tessera
