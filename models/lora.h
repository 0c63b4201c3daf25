// Which layers of a model get adapters, by the names that the field has for them.
//
//   llama   q_proj k_proj v_proj o_proj gate_proj up_proj down_proj
//   gpt2    c_attn attn.c_proj c_fc mlp.c_proj
//
// Of a model with experts those of attention. Everything else is frozen, so that a strategy sends and keeps only what
// adapters have; experts and routers too.
#pragma once
#include <string_view>
#include <vector>

#include "models/language_model.h"
#include "nn/adapters/lora.h"

namespace tessera {

struct LoraTarget {
  std::string_view name;
  std::string_view linear;  // within a layer of the model
  int part = 0;             // of the linear layer's fused outputs
};
// All that a model of this configuration has, in the order of its layers.
const std::vector<LoraTarget>& lora_targets(const ModelConfig& config);

// Rows of each of the matrices that the weight of a linear layer is fused of, at least one.
std::vector<int64_t> fused_rows(LanguageModel& model, Linear& linear);

// Freezes the model and adds the adapters of its configuration; models of rank 0 stay as they are. Before place(), and
// before there is memory. Throws FieldError ("lora_targets") for a name that the model does not have.
void attach_lora(LanguageModel& model);

// An adapter of a model that has some.
struct AttachedLora {
  int64_t layer = 0;
  const LoraTarget* target = nullptr;
  Linear* linear = nullptr;
  Lora* adapter = nullptr;
};
std::vector<AttachedLora> adapters_of(LanguageModel& model);

}  // namespace tessera
