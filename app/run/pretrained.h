// Uniform access to pretrained models: runs, checkpoints, Hugging Face folders, llm.c files, PEFT folders with a base.
#pragma once
#include "app/options.h"
#include "hub/gptq_format.h"
#include "train/checkpoint/state.h"
#include "train/memory.h"

namespace tessera {

struct Pretrained {
  std::filesystem::path path;
  ModelConfig config;  // without dropout
  DType dtype = DType::float32;
  // Tensors by Tessera's names, in any floating dtype; 4-bit weights also as bytes. Files stay mapped for the lifetime
  // of this.
  FullTensors tensors;
  std::string base = {};                     // adapters only: the base model
  std::string base_hash = {};                // hash of the base model, if it was recorded
  std::string merged = {};                   // merged adapters: the file and key that LoraConfig cannot represent
  std::filesystem::path own_tokenizer = {};  // adapters only: their directory if it has a tokenizer
  // The codes of a GPTQ folder by Tessera's names; nullopt for tensors without codes.
  std::optional<GptqConfig> gptq = {};
  std::function<std::optional<Int4Matrix>(const std::string& name)> codes = {};
  // The chat template of the training run; automatic: none, or the tokenizer's own.
  ChatTemplate chat_template = ChatTemplate::automatic;
  // Notes for the user: ignored keys of a folder, reasons for skipping newer checkpoints.
  std::vector<std::string> notes = {};

  const std::filesystem::path& tokenizer() const { return own_tokenizer.empty() ? path : own_tokenizer; }
};

// Opens a model. The base of adapters is `base` or the model that they name. Throws InputError for missing or malformed
// files and unsupported models; Error (usage) if `base` is given without adapters. Cost: headers are read and tensors
// mapped; the files of a checkpoint are hashed.
using Base = std::optional<std::string>;
Pretrained open_pretrained(const std::filesystem::path& from, const Base& base = {});
// The base of adapters: its canonical path and its hash, XXH3-64 over the names, shapes and float32 values of its
// tensors, which is computed by reading all of them if it was not recorded. `named` names the adapters. Throws
// InputError if the model at that path has a different hash, or if several directories match.
struct KnownBase {
  std::string path, hash;
};
KnownBase known_base(const Pretrained& adapters, const std::filesystem::path& named);
// Records the base model in the configuration of a run with adapters, or checks that a resumed run has the same base.
void record_base(TrainConfig& config);

// The directory of the tokenizer: that of the adapters if it has one, otherwise the checkpoint's, the model's, or that
// of the model file.
std::filesystem::path tokenizer_path(const std::filesystem::path& from, const Base& base = {});
// Prints the notes. With `trains`, throws InputError for adapters that LoraConfig cannot represent.
ModelConfig pretrained_config(const std::filesystem::path& from, const Base& base = {}, bool trains = false);
// False on all ranks of an MPI job except rank 0.
bool speaks_for_all();
// Prints notes on standard error, one per line, if speaks_for_all().
void say_notes(const std::vector<std::string>& notes);

// The configuration of the --init model, with an embedding row for each of --add-tokens. Throws as open_pretrained(),
// and Error (usage) for new tokens with adapters, which do not train embedding rows.
ModelConfig first_config(const TrainOptions& options);

// Initial tensors for a model of `config`: new adapters keep their initial values, weights are quantized to nf4 if
// `config` requires it, and new embedding rows are the mean of the existing ones.
FullTensors first_weights(const Pretrained& from, const ModelConfig& config);

// A model of `config` to be filled by first_weights(): only adapters are initialized randomly, because random
// initialization of all weights takes a core about 40 s per billion parameters.
std::unique_ptr<LanguageModel> first_model(const ModelConfig& config);

// Writes the sizes of a model into the options. Throws Error (usage) for options with different values. A smaller
// context is kept: rotary positions have no fixed length, and only the first rows of a position table are read.
void take_model(TrainOptions& options, const ModelConfig& config);

// Memory checks, which run before any allocation or output.

// Runs before data are read. Throws Error (usage) as below.
void check_minimum_memory(const Job& job);
// Memory for `ranks` ranks of this host, beginning with rank `first`; `vocab` is used if the job has no vocabulary
// size; `samples`: a text is generated at the end. GPU ranks are not checked. Prints a table on standard error and
// throws Error (usage) if memory is insufficient.
void check_memory_for_training(const TrainConfig& config, bool samples, int64_t vocab, HostMemory here);
void check_memory_for_verifying(const Job& job);
void check_memory_for_inference(const Job& job);
// Guards against absurd sizes in a file: throws InputError, naming both files, if the model described by `config` is
// many times larger than any `model.safetensors` in `folder` or in a checkpoint there. An unknown vocabulary counts as
// 1.
void check_described(const std::filesystem::path& config, const std::filesystem::path& folder, const Job& job,
                     int64_t vocab = 1);

// A model for inference under a plan, used by `generate`, `evaluate` and `checkpoint quantize`.

struct Inference {
  Pretrained from;
  TrainOptions run;  // the equivalent configuration
  std::unique_ptr<Tokenizer> tokenizer;
};

// `words` are options of a run; without any option about ranks there is one rank. Prints notes on standard error.
// Throws Error (usage), InputError, and Error if memory is insufficient.
Inference open_inference(const std::string& from, const Args& words);

// This rank's shard of the model. `inference` must outlive the result.
std::unique_ptr<Trainer> inference_trainer(const Inference& inference, Communicator& world);

}  // namespace tessera
