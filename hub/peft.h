// Adapters in the format of the PEFT library: a directory with adapter_config.json, which names the base model, and
// adapter_model.safetensors.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/adapters/adapters.h"
#include "train/checkpoint/full_state.h"

namespace tessera {

// Whether a directory contains adapter_config.json and is not a Tessera run.
bool is_peft_folder(const std::filesystem::path& folder);

// Full names and name suffixes, or one regular expression.
struct PeftNames {
  std::vector<std::string> list;
  std::string regex = {}, where = {};  // `where`: file and key, for messages
  bool all_linear = false;

  bool empty() const { return list.empty() && regex.empty() && !all_linear; }
  // The list entry or regular expression that matches a layer, or "all-linear"; empty if none matches.
  std::string found(const std::string& layer) const;
};

struct PeftConfig {
  LoraConfig lora;   // without targets
  std::string base;  // path, if any
  PeftNames targets, excluded;
  std::vector<int64_t> layers;                         // the only layers with adapters; empty: all
  std::vector<std::string> layers_pattern, saved;      // regular expressions; fully trained modules
  std::map<std::string, double> ranks, alphas;         // by regular expressions of modules
  std::map<std::string, std::vector<int64_t>> tokens;  // trained rows by module; "": the embedding
  bool magnitudes = false, adds_bias = false;          // DoRA; B has a bias
  bool biases = false;                                 // the base's biases were trained
  bool preserves_tie = false;                          // a tied head uses the trained embedding
};
// Keys that change the computation are read, or rejected by name if their values request unsupported features, such as
// initializations that modify the base's weights. `what` names the file; `notes` receives a line about unused keys.
// Throws InputError.
PeftConfig parse_peft_config(std::string_view json, const std::string& what, std::vector<std::string>* notes = nullptr);
std::string peft_config(const LoraConfig& lora, Family family, const std::string& base);

struct PeftTensor {
  std::string ours;
  Shape shape;
  std::string theirs;
};
// `merged` is empty if LoraConfig can describe the adapters. Otherwise it names the file and key that prevent this
// (layers of different ranks, DoRA, trained embeddings, ...); `config` then has no adapters, and `tensors` are the
// merged weights.
struct Adapted {
  ModelConfig config;
  FullTensors tensors;
  std::string merged = {};
};

// In the order of the model's layers. Cost: shapes only.
std::vector<PeftTensor> peft_tensors(const ModelConfig& config);

// Resolves `name` relative to the current directory or to `folder`; `where` names file and key. Throws InputError if
// neither path exists, or if both do and differ.
std::filesystem::path find_base(const std::filesystem::path& name, const std::filesystem::path& folder,
                                const std::string& where);

// In transformers: "model.layers.0.self_attn.q_proj".
std::string hub_layer(const ModelConfig& config, int64_t layer, const LoraTarget& target);

class PeftFolder {
 public:
  // Throws InputError naming the file and the key.
  explicit PeftFolder(const std::filesystem::path& folder);
  // The directory or run of the base: `given`, else the recorded name, else next to the adapters. Throws InputError if
  // none exists.
  std::filesystem::path base(const std::optional<std::string>& given = {}) const;
  // Empty if it was not recorded with the adapters.
  std::string base_hash() const;
  const std::vector<std::string>& notes() const { return notes_; }
  // `tensors` are the base's. Throws InputError for a layer missing from the base, and for a tensor that is missing, of
  // the wrong shape, or unknown.
  Adapted apply_to(const ModelConfig& base, FullTensors tensors) const;

 private:
  std::filesystem::path path_;
  std::vector<std::string> notes_;
  PeftConfig config_;
  std::shared_ptr<const Safetensors> file_;
  std::map<std::string, const TensorBytes*> tensors_;  // without the affixes of training wrappers
};

// Writes into an existing directory. Throws OutputError.
void write_peft_folder(const std::filesystem::path& folder, const ModelConfig& config, DType dtype,
                       const FullTensors& source, const std::string& base, const std::string& base_hash = {});

// An equivalent model without adapters: W + scale B A, added in float32. `config` must have adapters.
ModelConfig merged(ModelConfig config);
FullTensors merged(const ModelConfig& config, FullTensors source);

}  // namespace tessera
