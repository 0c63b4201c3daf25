// Adapters in the form of the PEFT library: a folder with adapter_config.json and adapter_model.safetensors, beside the
// model that it names as its base.
#pragma once

#include "models/adapters/adapters.h"
#include "train/checkpoint/state.h"

namespace tessera {

// Whether a folder has an adapter_config.json and is no run of Tessera's.
bool is_peft_folder(const std::filesystem::path& folder);

// Names of layers, as PEFT looks for them: a list of whole names and ends of names, or one regular expression.
struct PeftNames {
  std::vector<std::string> list;
  std::string regex = {}, where = {};  // where: the file and the key, for messages
  bool all_linear = false;

  bool empty() const { return list.empty() && regex.empty() && !all_linear; }
  // The name of the list by which a layer is meant, another text where it is meant without; empty where it is not.
  std::string found(const std::string& layer) const;
};

// The contents of adapter_config.json.
struct PeftConfig {
  LoraConfig lora;   // without targets
  std::string base;  // maybe a path
  PeftNames targets, excluded;
  std::vector<int64_t> layers;                     // the only ones that have adapters; empty: all
  std::vector<std::string> layers_pattern, saved;  // regular expressions; names of modules that were trained as a whole
  std::map<std::string, double> ranks, alphas;     // by regular expressions of modules
  std::map<std::string, std::vector<int64_t>> tokens;  // trained rows, by module; "": the embedding
  bool magnitudes = false, adds_bias = false;          // DoRA; B has a bias
  bool biases = false;                                 // biases of the base were trained
  bool keeps_tied = false;                             // a tied head follows what the embedding learns
};
// Keys that change what an adapter computes are read, or refused by their names where their values ask for what Tessera
// does not compute: weights of the base that its first values change, among them. `what` names the file; `notes` gets a
// line about keys that are not read. Throws InputError.
PeftConfig parse_peft_config(std::string_view json, const std::string& what, std::vector<std::string>* notes = nullptr);
std::string peft_config(const LoraConfig& lora, Family family, const std::string& base);

// A matrix of an adapter, by our name and by PEFT's.
struct PeftTensor {
  std::string ours;
  Shape shape;
  std::string theirs;
};
// A base with adapters. `merged` is empty if LoraConfig can describe them. Else it names the file and the key because
// of which it cannot (layers of different ranks, DoRA, trained embeddings ...); then `config` has no adapters, and the
// tensors are the base's with what the adapters add.
struct Adapted {
  ModelConfig config;
  FullTensors tensors;
  std::string merged = {};
};

// All of a model with adapters, in the order of its layers. Cost: shapes only.
std::vector<PeftTensor> peft_tensors(const ModelConfig& config);

// The base that a file in `folder` names: a path, which may be relative to the current directory or to that directory.
// `where` names file and key. Throws InputError where there is none, or another one in each.
std::filesystem::path find_base(const std::filesystem::path& name, const std::filesystem::path& folder,
                                const std::string& where);

// The layer that a target is, as transformers names it: "model.layers.0.self_attn.q_proj".
std::string hub_layer(const ModelConfig& config, int64_t layer, const LoraTarget& target);

class PeftFolder {
 public:
  // Throws InputError naming the file and the key.
  explicit PeftFolder(const std::filesystem::path& folder);
  // The folder or run of the base: `given`, else as it is named, or beside the adapters. Throws InputError where there
  // is none.
  std::filesystem::path base(const std::optional<std::string>& given = {}) const;
  // The hash of the base, if the program that wrote the adapters recorded it.
  std::string base_hash() const;
  const std::vector<std::string>& notes() const { return notes_; }
  // The base, whose tensors are `tensors`, with the adapters. Throws InputError for a layer that the base does not
  // have, and naming a tensor that is missing, is of another shape, or is no part of the adapters.
  Adapted apply_to(const ModelConfig& base, FullTensors tensors) const;

 private:
  std::filesystem::path path_;
  std::vector<std::string> notes_;
  PeftConfig config_;
  std::shared_ptr<const Safetensors> file_;
  std::map<std::string, const TensorBytes*> tensors_;  // without what wrappers left in their names
};

// Writes both files into a folder that is there. Throws OutputError.
void write_peft_folder(const std::filesystem::path& folder, const ModelConfig& config, DType dtype,
                       const FullTensors& source, const std::string& base, const std::string& base_hash = {});

// The model without adapters that computes the same: W + scale B A, added in float32. `config` has adapters.
ModelConfig merged(ModelConfig config);
FullTensors merged(const ModelConfig& config, FullTensors source);

}  // namespace tessera
