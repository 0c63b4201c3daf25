// Adapters beside the frozen weights of a model (nn/adapters/lora.h), and frozen weights in four bits
// (nn/quantize/packed.h).
//
// Adapters are for linear layers by the names that the transformers library has for them:
//
//   llama   q_proj k_proj v_proj o_proj gate_proj up_proj down_proj
//   gpt2    c_attn attn.c_proj c_fc mlp.c_proj
//
// In a model with experts, attention alone has them. Everything else is frozen, so that a strategy sends and keeps
// only what adapters have; experts and routers too. In four bits are all linear layers inside of decoder layers, as
// QLoRA has it. Embeddings, head, norms, biases and adapters stay as they are.
#pragma once

#include "models/language_model.h"
#include "nn/adapters/lora.h"

namespace tessera {

struct LoraTarget {
  std::string_view name;
  std::string_view linear;  // within a layer of the model
  int part = 0;             // among the linear layer's fused outputs
};
// All that a model of this configuration has, in the order of its layers.
std::vector<LoraTarget> lora_targets(const ModelConfig& config);

// Rows of each of `parts` matrices that a weight of so many rows is fused of: gate and up, or q, k and v.
std::vector<int64_t> fused_rows(const ModelConfig& config, size_t parts, int64_t rows);

// Freezes the model and adds the adapters of its configuration; models of rank 0 stay as they are. Before place(), and
// before there is memory. Throws FieldError ("lora_targets") for a name that the model does not have.
void attach_lora(LanguageModel& model);

// An adapter of a model that has some.
struct AttachedLora {
  int64_t layer = 0;
  LoraTarget target = {};
  Linear* linear = nullptr;
  Lora* adapter = nullptr;
};
std::vector<AttachedLora> adapter_tensors(LanguageModel& model);

// Freezes the weights of a model whose configuration asks for four bits, and says how they are quantised. Before
// place(), and before there is memory. Throws Error (usage) for sizes that do not divide.
void pack_layers(LanguageModel& model);

// The packings of the whole model, by the names of their parameters. Cost: shapes only.
std::map<std::string, Packing> weight_packings(const ModelConfig& config);

}  // namespace tessera
