// A language model, as everything above it sees it: a pipeline, the oracle, generation, counts of FLOPs and of bytes.
//
//   ids --embed--> x --layer 0--> x --layer 1--> ... --finish--> hidden --loss--> loss      x, hidden: (B, T, C)
//
// A model declares its modules in that order: those before the layers go with the first stage of a pipeline, those
// after them with the last one.
#pragma once

#include "nn/experts/experts.h"
#include "tensor/error.h"
#include "tensor/ops/quantize/quantize.h"

namespace tessera {

// --- families, a row for each in models/families.cpp: what the layers of its decoder are made of (models/decoder.h),
// and what the transformers library calls their tensors ---

enum class Family : uint8_t { gpt2, llama };
constexpr std::array<std::string_view, 2> kFamilyNames = {"gpt2", "llama"};
constexpr const auto& value_names(Family) { return kFamilyNames; }

// The name of one of our parameters, or of a module within a layer, and of the tensors whose rows are put together in
// it: one; gate and up; or q, k and v. {} stands for the number of an expert.
struct TensorNames {
  std::string_view ours;
  std::vector<std::string_view> theirs;
};

struct FamilyRow {
  bool centered_norms = false;  // LayerNorm, else RMSNorm
  bool rotary = true;           // positions turn q and k, else a table of them is added to the tokens
  bool gated = true;            // SwiGLU, else GELU
  bool biases = false;          // every linear layer has one

  std::string_view layers = "model.layers";    // stands before the number of a layer
  std::string_view optional_prefix = {};       // published files may leave it out
  std::vector<std::string_view> derived = {};  // ends of names in files that are no parameters
  bool transposed = false;                     // matrices of layers are kept as (in, out)
  std::vector<TensorNames> outside = {};       // parameters that are in no layer
  std::vector<TensorNames> norms = {}, attention = {}, feed_forward = {};  // in a layer; adapters are for the last two

  std::string_view usual_adapters = "q_proj,v_proj";

  // The row of a module within a layer, or null.
  const TensorNames* find(std::string_view module) const;
};
const FamilyRow& find_row(Family family);

// --- sizes ---

// Low-rank adaptation of a model whose own weights are frozen (nn/adapters/lora.h, models/adapters/adapters.h).
struct LoraConfig {
  int64_t rank = 0;  // 0: none
  double alpha = 0, dropout = 0;
  bool rank_stabilised = false;           // alpha / sqrt(rank) in place of alpha / rank (Kalajdzievski 2023)
  std::vector<std::string> targets = {};  // names of linear layers
  bool starts_idle = true;                // the adapted model begins as the one that it adapts

  double scale() const {
    return alpha / (rank_stabilised ? std::sqrt(static_cast<double>(rank)) : static_cast<double>(rank));
  }
  bool operator==(const LoraConfig&) const = default;
};

// Frozen weights of linear layers in four bits (models/adapters/adapters.h).
struct QuantizeConfig {
  Codec codec = Codec::none;
  int64_t group = 128;  // gptq: columns that share a scale; -1: all of a row
  bool operator==(const QuantizeConfig&) const = default;
};

// Twice the keys that a query sees, on average: of `context` tokens, or the last `window` (0: all).
inline double visible_keys(int64_t context, int64_t window) {
  const auto t = static_cast<double>(context), w = window > 0 ? std::min(static_cast<double>(window), t) : t;
  return w * (2 - w / t);
}

struct ModelConfig {
  Family family = Family::gpt2;  // a model of your own does not look at it
  int64_t layers = 4, heads = 4, channels = 128, context = 64, vocab = 256;
  double dropout = 0;
  Recompute recompute = Recompute::none;
  bool tied = true;         // the head is the token embedding
  bool tie_copies = false;  // each use of a tied weight has a copy of its own (Parameter::tie)
  int64_t kv_heads = 0;     // for keys and values; 0: as many as heads
  int64_t head_dim = 0;     // 0: channels / heads
  int64_t ffn = 0;          // hidden channels of a feed-forward layer; 0: 4 channels
  int64_t positions = 0;    // rows of a table of positions; 0: as many as the context
  double norm_eps = 1e-5;
  GeluForm gelu = GeluForm::tanh;  // of families whose feed-forward layers have no gates
  // Parts of families whose positions are rotary:
  RotaryOptions rotary = {};
  int64_t window = 0;         // last tokens that one attends to; 0: all
  bool qkv_bias = false;      // q, k and v have some
  bool proj_bias = false;     // the projection behind attention has one
  bool mlp_bias = false;      // both layers of a gated feed-forward layer have some
  bool qk_norm = false;       // each head of q and k is normalised
  ExpertConfig experts = {};  // in place of the feed-forward layers, each of them `ffn` wide
  LoraConfig lora = {};
  QuantizeConfig quantize = {};
  bool whole_updates = false;  // the optimizer needs matrices of layers whole (Parameter::whole_update)

  int64_t key_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  Heads all_heads() const { return {heads, key_heads()}; }
  int64_t head_size() const { return head_dim > 0 ? head_dim : channels / heads; }
  int64_t attended() const { return heads * head_size(); }  // channels of q, and of what attention gives
  int64_t hidden() const { return ffn > 0 ? ffn : 4 * channels; }
  int64_t position_rows() const { return positions > 0 ? positions : context; }
  double keys() const { return visible_keys(context, window); }
  // Deviation of the first weights of layers that add to the residual: GPT-2's 0.02 / sqrt(2 layers).
  double residual_deviation() const { return 0.02 / std::sqrt(2.0 * static_cast<double>(layers)); }
};

// The names of a model's values (for users, JSON, messages) and the entries of its fields (settings/setting.h).
constexpr std::array<std::string_view, 2> kRouterSoftmaxNames = {"chosen", "all"};
constexpr std::array<std::string_view, 4> kRopeScalingNames = {"none", "linear", "llama3", "yarn"};
constexpr std::array<std::string_view, 2> kGeluNames = {"tanh", "erf"};
constexpr std::array<std::string_view, 3> kCodecNames = {"none", "nf4", "gptq"};

constexpr const auto& value_names(RouterSoftmax) { return kRouterSoftmaxNames; }
constexpr const auto& value_names(RopeScaling) { return kRopeScalingNames; }
constexpr const auto& value_names(GeluForm) { return kGeluNames; }
constexpr const auto& value_names(Codec) { return kCodecNames; }

template <class Enum>
constexpr std::string_view value_name(Enum value) {
  return name_in(value_names(value), value);
}

class Settings;
Settings field_descriptors(ModelConfig& config);
// The sizes of `config`, with those that follow from others filled in.
ModelConfig whole_sizes(ModelConfig config);

// (B, T, C) -> (B, T, C); under Recompute::block its forward pass runs again in the backward pass.
class DecoderLayer : public Module {
 public:
  // The same for new tokens (B, T, C) of B texts, behind those in their caches; appends their keys and values. Gives
  // the last `answers` tokens alone, (B, answers, C). No gradient. Throws Error unless it is overridden.
  virtual Tensor decode(const Tensor& x, std::span<KvCache* const> texts, int64_t answers);
};

using TextCache = std::vector<KvCache>;  // one text, by layer

struct ModelAxes;  // models/layout.h

class LanguageModel : public Module {
 public:
  const ModelConfig config;

  // --- what a model is ---
  virtual Var embed(const Tensor& ids) = 0;  // int32 (B, T), tokens at step().positions
  virtual DecoderLayer& layer(int64_t i) = 0;
  virtual Var finish(const Var& x) { return x; }
  virtual Var logits(const Var& hidden) = 0;  // (B, T, C) -> (B T, V)
  // targets int32 of any shape; `scale` as in cross_entropy().
  virtual Loss head_loss(const Var& hidden, const Tensor& targets, double scale);
  // Divides it among the ranks of axes that are not of size 1, before it has memory. Throws FieldError unless it is
  // overridden: without it a model trains under dp, ZeRO and pp.
  virtual void place(const ModelAxes& axes);

  // --- what follows ---
  // embed(). Backward passes reach it even if only layers are trained, so that all layers are treated alike.
  Var embedded(const Tensor& ids);
  Var hidden(const Tensor& ids);  // int32 (B, T) -> (B, T, C)
  Loss loss(const Tensor& ids, const Tensor& targets, double scale);

  // Decoding without gradients: logits (B, V) of the token that follows the last of `ids` (B, T). The ids continue the
  // B texts whose tokens are in the caches. Afterwards set_step() says: not training.
  TextCache cache(int64_t capacity) const { return TextCache(static_cast<size_t>(config.layers), KvCache{capacity}); }
  TextCache cache() const { return cache(config.context); }
  Tensor decode(const Tensor& ids, std::span<TextCache* const> texts);
  Tensor decode(const Tensor& ids, TextCache& text) { return decode(ids, std::array{&text}); }
  // The parts of decode(), for ranks that have some of the layers: embeddings (B, T, C), after set_step() to the
  // place of the tokens; a layer; and logits (B, V) of the last token, or this rank's columns of them.
  Tensor decode_first(const Tensor& ids, std::span<TextCache* const> texts);
  Tensor decode_layer(int64_t i, const Tensor& x, std::span<TextCache* const> texts);
  Tensor decode_last(const Tensor& x);
  // The step of tokens that continue those in the caches.
  StepInfo decode_step(int64_t tokens, std::span<TextCache* const> texts, const ArenaPtr& arena) const;

  // The layer that each unit of layout() belongs to; -1 before the layers, config.layers after them.
  std::vector<int64_t> layers_of_units();
  // FLOPs of a token's forward pass through layer i: two for each element of a matrix that it meets, and its causal
  // attention.
  double layer_flops(int64_t i);
  double head_flops() const { return 2 * static_cast<double>(config.channels) * static_cast<double>(config.vocab); }
  // FLOPs of training on a token, 6 N + 12 L C T (Chowdhery et al. 2022, appendix B), with 4 N for frozen parameters.
  // Experts that a token does not meet, and tables that are only looked up, are not in N.
  double training_flops();

 protected:
  explicit LanguageModel(const ModelConfig& c) : config(c) {}
  // Each child is a unit.
  template <class M, class... Args>
  M& child(const std::string& name, Args&&... args) {
    M& made = Module::child<M>(name, std::forward<Args>(args)...);
    made.make_unit();
    if (std::is_base_of_v<DecoderLayer, M> && config.recompute == Recompute::block) recompute(made);
    if (std::is_base_of_v<DecoderLayer, M> && config.whole_updates) mark_matrices(made);
    return made;
  }
  // The head of a model with this table: the table itself where they are tied, else, or where each use is to have its
  // copy, a unit of its own.
  Embedding& make_head(Embedding& tokens);

 private:
  static void recompute(Module& layer);
  static void mark_matrices(Module& layer);
  int64_t idle_elements(int64_t i);  // in experts of layer i that a token does not meet
};

using ModelFactory = std::function<std::unique_ptr<LanguageModel>(const ModelConfig&)>;
// The model that a user's factory makes; throws Error if `make` is empty or returns null.
std::unique_ptr<LanguageModel> build_model(const ModelFactory& make, const ModelConfig& config);

// A model of the family that the configuration names (models/families.cpp).
std::unique_ptr<LanguageModel> make_model(const ModelConfig& config);

// Sizes of models by name, there too. Published ones are as their makers' papers and files say; a vocabulary of 0 is
// the tokenizer's.
std::optional<ModelConfig> preset(std::string_view name);
std::string_view plain_preset(Family family);  // the first of the family
// "gpt-nano|gpt-mini|...", in the order of the table.
const std::string& preset_names();

}  // namespace tessera
