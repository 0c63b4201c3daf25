// config.json of a folder in the form of the Hugging Face hub, and the model that it describes.
//
// Keys that change what a model computes are read or held to the value that Tessera computes; keys that do not (about
// training, generation, the file itself) are passed over; any other key is refused by its name, and nothing is guessed.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "hub/gptq_format.h"
#include "models/language_model.h"

namespace tessera {

// Of "model_type" gpt2, llama, mistral, qwen2, qwen3, mixtral or qwen3_moe, with rotary positions in the older spelling
// ("rope_theta", "rope_scaling") or the newer ("rope_parameters"). Without dropout. `what` names the file. Throws
// InputError naming the key, what was expected and found: a sliding window, another activation, biases that no layer
// here has; and quantised weights unless the caller takes them and they are GPTQ's.
ModelConfig parse_hub_config(std::string_view json, const std::string& what, std::optional<GptqConfig>* gptq = nullptr);

// What the transformers library reads as the same model, in both spellings. The family is the plainest that has all
// that the model has: gpt2, llama, qwen2 (biases of q, k and v) or qwen3 (norms of q and k), mixtral or qwen3_moe.
// Throws Error for a model that is none of them.
std::string hub_config(const ModelConfig& config, DType dtype, const GptqConfig* gptq = nullptr);

}  // namespace tessera
