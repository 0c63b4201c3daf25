// A model in the words of the Hugging Face hub: config.json, and the names of tensors in the transformers library.
//
// Keys that change what a model computes are read, or refused by their names where their values ask for what no layer
// here computes. Any other key may hold anything. The tables of keys, and of what is usual where one is left out, stand
// in hub/config.cpp; that of tensors in models/families.cpp.
#pragma once

#include "hub/gptq_format.h"
#include "models/language_model.h"

namespace tessera {

// The model of a file with "model_type" gpt2, llama, mistral, qwen2, qwen3, mixtral or qwen3_moe, with rotary positions
// in the older spelling ("rope_theta", "rope_scaling") or the newer ("rope_parameters"). Without dropout. `what` names
// the file; `notes` gets a line about keys that are not read. Throws InputError naming the key, what was expected and
// found: another activation, biases that no layer here has, windows of some layers; and quantised weights unless the
// caller takes them and they are GPTQ's.
ModelConfig parse_hub_config(std::string_view json, const std::string& what, std::optional<GptqConfig>* gptq = nullptr,
                             std::vector<std::string>* notes = nullptr);

// Writes what the transformers library reads as the same model, in both spellings. The family is the plainest that has
// all that the model has: gpt2, llama, mistral (a sliding window), qwen2 (biases of q, k and v) or qwen3 (norms of q
// and k), mixtral or qwen3_moe. Throws Error for a model that is none of them.
std::string hub_config(const ModelConfig& config, DType dtype, const GptqConfig* gptq = nullptr);

// One of our tensors: the rows of some of theirs, one after another, or one of theirs transposed.
struct HubTensor {
  struct Piece {
    std::string name;
    int64_t rows = 0;  // in ours
  };
  std::string name;
  Shape shape;
  std::vector<Piece> pieces;
  bool transposed = false;  // GPT-2's layers keep (in, out)

  // The shape of a piece as it is stored.
  std::vector<int64_t> piece_shape(const Piece& piece) const;
};

// All tensors of a model, in the order of its parameters; a tied head is not named again. Cost: shapes only.
std::vector<HubTensor> hub_tensors(const ModelConfig& config);

}  // namespace tessera
