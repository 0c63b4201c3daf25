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

#include "models/config.h"

namespace tessera {

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
    if (std::is_base_of_v<DecoderLayer, M> && config.full_matrix_updates) mark_matrices(made);
    return made;
  }
  // The token embedding itself if tied, else (or with a copy per use) a separate unit.
  Embedding& make_head(Embedding& tokens);

 private:
  static void recompute(Module& layer);
  static void mark_matrices(Module& layer);
  int64_t idle_elements(int64_t i);  // elements of the experts in layer i that a token does not select
};

using ModelFactory = std::function<std::unique_ptr<LanguageModel>(const ModelConfig&)>;
// Throws Error if `make` is empty or returns null.
std::unique_ptr<LanguageModel> build_model(const ModelFactory& make, const ModelConfig& config);

std::unique_ptr<LanguageModel> make_model(const ModelConfig& config);

}  // namespace tessera
