// LoRA adapters on frozen weights (nn/adapters/lora.h), and frozen 4-bit weights (nn/quantize/packed.h).
//
// Adapter targets are linear layers, named as in the transformers library:
//
//   llama   q_proj k_proj v_proj o_proj gate_proj up_proj down_proj
//   gpt2    c_attn attn.c_proj c_fc mlp.c_proj
//
// With experts, only attention has adapters. Everything else, including experts and routers, is frozen, so strategies
// reduce and store only adapter state. As in QLoRA, only linear layers within decoder layers are 4-bit.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "models/language_model.h"
#include "nn/adapters/lora.h"

namespace tessera {

struct LoraTarget {
  std::string_view name;
  std::string_view linear;  // name within a layer
  int index = 0;            // among the linear layer's fused outputs
};
// In layer order.
std::vector<LoraTarget> lora_targets(const ModelConfig& config);

// Row counts of the fused matrices in a weight with the given rows: gate and up, or q, k and v.
std::vector<int64_t> fused_rows(const ModelConfig& config, size_t count, int64_t rows);

// No-op for rank 0. Call before place() and materialization. Throws FieldError ("lora_targets") for unknown names.
void attach_lora(LanguageModel& model);

struct AttachedLora {
  int64_t layer = 0;
  LoraTarget target = {};
  Linear* linear = nullptr;
  Lora* adapter = nullptr;
};
std::vector<AttachedLora> adapter_tensors(LanguageModel& model);

// No-op unless the configuration requests 4 bits. Call before place() and materialization. Throws Error (usage) for
// indivisible sizes.
void pack_layers(LanguageModel& model);

// By parameter name, for the full model. Cost: shapes only.
std::map<std::string, Packing> weight_packings(const ModelConfig& config);

}  // namespace tessera
