// Pretrained models from runs, checkpoints, Hugging Face folders, llm.c files, and PEFT folders with a base.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "app/options.h"
#include "hub/gptq_format.h"
#include "train/checkpoint/full_state.h"
#include "train/run/run_directory.h"
#include "train/trainer.h"

namespace tessera {

// Resolves a path to a checkpoint, `best` or `latest` next to checkpoints, or a run directory, whose newest checkpoint
// without infinities or NaNs is used. Throws InputError.
Checkpoint find_checkpoint(const std::filesystem::path& from, std::vector<std::string>& passed_over);
std::set<std::string> tensor_names(LanguageModel& model);

struct Pretrained {
  std::filesystem::path path;
  ModelConfig config;  // without dropout
  DType dtype = DType::float32;
  // By Tessera's names, in any floating dtype; 4-bit weights also as bytes. The files stay mapped during the lifetime
  // of this struct.
  FullTensors tensors;
  std::string base = {};                     // adapters only
  std::string base_hash = {};                // if recorded
  std::string merged = {};                   // merged adapters: file and key that LoraConfig cannot represent
  std::filesystem::path own_tokenizer = {};  // adapters only: their directory if it has a tokenizer
  // By Tessera's names; nullopt for tensors without codes.
  std::optional<GptqConfig> gptq = {};
  std::function<std::optional<Int4Matrix>(const std::string& name)> codes = {};
  // The training run's template; automatic: none, or the tokenizer's own.
  ChatTemplate chat_template = ChatTemplate::automatic;
  // Ignored keys of a folder, and reasons for skipping newer checkpoints.
  std::vector<std::string> notes = {};

  const std::filesystem::path& tokenizer() const { return own_tokenizer.empty() ? path : own_tokenizer; }
};

// The base of adapters is `base` or the model that they name. Throws InputError for missing or malformed files and
// unsupported models; Error (usage) if `base` is set without adapters. Cost: reads headers, maps tensors, hashes the
// files of a checkpoint.
using Base = std::optional<std::string>;
Pretrained open_pretrained(const std::filesystem::path& from, const Base& base = {});
// Canonical path and hash: XXH3-64 over the names, shapes and float32 values of the tensors, which reads all tensors if
// the hash was not recorded. `named` names the adapters. Throws InputError if the model at that path has a different
// hash, or if several directories match.
struct KnownBase {
  std::string path, hash;
};
KnownBase known_base(const Pretrained& adapters, const std::filesystem::path& named);
// Records the base model in the configuration of a run with adapters, or checks that a resumed run has the same base.
void record_base(TrainConfig& config);

// The adapters' directory if it has a tokenizer, otherwise that of the checkpoint, model or model file.
std::filesystem::path tokenizer_path(const std::filesystem::path& from, const Base& base = {});
// Prints the notes. With `trains`, throws InputError for adapters that LoraConfig cannot represent.
ModelConfig pretrained_config(const std::filesystem::path& from, const Base& base = {}, bool trains = false);

// The --init model's configuration with an embedding row for each of --add-tokens. Throws as open_pretrained(), and
// Error (usage) for new tokens with adapters, which do not train embedding rows.
ModelConfig first_config(const TrainConfig& config);

// New adapters retain their initial values, weights are quantized to nf4 if `config` requires it, and new embedding
// rows are the mean of the existing ones.
FullTensors first_weights(const Pretrained& from, const ModelConfig& config);

// To be filled by first_weights(). Only adapters are initialized randomly, because random initialization of all weights
// takes one core about 40 s per billion parameters.
std::unique_ptr<LanguageModel> first_model(const ModelConfig& config);

// Writes the model's sizes into the options. Throws Error (usage) for options with different values. A smaller context
// is retained: rotary positions have no fixed length, and only the first rows of a position table are read.
void take_model(TypedOptions& options, const ModelConfig& config);

}  // namespace tessera
