// Hugging Face model configurations: config.json, and the tensor names of the transformers library.
//
// Keys that change a model's computation are read, or rejected by name if their values request unsupported features;
// all others are ignored.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hub/gptq_format.h"
#include "models/language_model.h"

namespace tessera {

// Reads "model_type" gpt2, llama, mistral, qwen2, qwen3, mixtral or qwen3_moe and RoPE in the older ("rope_theta",
// "rope_scaling") or newer format ("rope_parameters"). Dropout is set to 0. `what` names the file; `notes` receives a
// line about unused keys. Throws InputError naming the key, the expected and the actual value for unsupported
// activations, biases and per-layer windows, and for quantized weights unless they are GPTQ and `gptq` is not null.
ModelConfig parse_hub_config(std::string_view json, const std::string& what, std::optional<GptqConfig>* gptq = nullptr,
                             std::vector<std::string>* notes = nullptr);

// Writes a configuration that transformers reads as the same model, in both RoPE formats, using the simplest family
// with all features of the model. Throws Error if no family matches.
std::string hub_config(const ModelConfig& config, DType dtype, const GptqConfig* gptq = nullptr);

// A Tessera tensor: concatenated rows of hub tensors, or one hub tensor transposed.
struct HubTensor {
  struct Slice {
    std::string name;
    int64_t rows = 0;  // of Tessera's tensor
  };
  std::string name;
  Shape shape;
  std::vector<Slice> slices;
  bool transposed = false;  // GPT-2 stores weights as (in, out)

  std::vector<int64_t> slice_shape(const Slice& slice) const;
};

// In the order of the model's parameters; a tied head is omitted. Cost: shapes only.
std::vector<HubTensor> hub_tensors(const ModelConfig& config);

}  // namespace tessera
