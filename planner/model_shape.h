// A model by its sizes alone: all that a prediction needs to know of it.
#pragma once
#include <cstdint>

#include "models/language_model.h"

namespace tessera::planner {

enum class Positions : uint8_t { learned, rope };

struct ModelShape {
  int64_t layers = 0, channels = 0, heads = 0;
  int64_t kv_heads = 0;  // 0: as many as heads
  int64_t head_dim = 0;  // 0: channels / heads
  int64_t ffn = 0;       // hidden channels of a feed-forward layer, or of an expert; 0: 4 channels
  int64_t experts = 0, experts_per_token = 0;
  bool gated = false;  // SwiGLU: three matrices instead of two
  int64_t vocab = 0, context = 0;
  bool tied = true;
  Positions positions = Positions::learned;
  bool qkv_bias = false, qk_norm = false;  // of models without other biases, as in ModelConfig
  bool operator==(const ModelShape&) const = default;

  int64_t key_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  int64_t head_size() const { return head_dim > 0 ? head_dim : channels / heads; }
  int64_t query() const { return heads * head_size(); }      // channels of q, and of what attention gives
  int64_t key() const { return key_heads() * head_size(); }  // of k, and of v
  int64_t hidden() const { return ffn > 0 ? ffn : 4 * channels; }
};

// Throws FieldError for shared experts, which predictions do not know.
ModelShape shape_of(const ModelConfig& config);

// Parameters: of the feed-forward layer, or of all experts; of all that a layer multiplies with; of a layer; of all.
double expert_parameters(const ModelShape& m);
double layer_matrices(const ModelShape& m);
double layer_parameters(const ModelShape& m);
double parameters(const ModelShape& m);
double active_parameters(const ModelShape& m);  // those that a token meets: of its experts alone

}  // namespace tessera::planner
