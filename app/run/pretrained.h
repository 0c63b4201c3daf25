// A model that somebody trained before: a run, one of its checkpoints, a Hugging Face folder, a file of llm.c, or a
// PEFT folder beside one of these. Whoever begins with such a model takes it from here and does not ask which of them
// it was.
#pragma once
#include "app/options.h"
#include "hub/gptq_format.h"
#include "train/checkpoint/state.h"
#include "train/memory.h"

namespace tessera {

struct Pretrained {
  std::filesystem::path path;    // the checkpoint, or the folder
  ModelConfig config;            // without dropout
  DType dtype = DType::float32;  // that its tensors are stored in
  // By our names, in any floating dtype; what is held in four bits as bytes too. Files stay mapped as long as this
  // lives.
  FullTensors tensors;
  std::string base = {};       // adapters only: the model that they were trained on
  std::string base_hash = {};  // its hash where that was recorded
  std::string merged = {};     // adapters that are in the weights: the file and key that LoraConfig cannot describe
  std::filesystem::path own_tokenizer = {};  // adapters only: their directory, if it has a tokenizer
  // The codes of a folder whose layers are in 4 bits, by our names: a tensor's, or nothing where it has none.
  std::optional<GptqConfig> gptq = {};
  std::function<std::optional<Int4Matrix>(const std::string& name)> codes = {};
  // The template that its run was told to learn; automatic: none, or the tokenizer's own.
  ChatTemplate chat_template = ChatTemplate::automatic;
  // Lines for the user: keys of a folder that are not read, why newer checkpoints of a run were not taken.
  std::vector<std::string> notes = {};

  const std::filesystem::path& tokenizer() const { return own_tokenizer.empty() ? path : own_tokenizer; }
};

// Adapters lie beside `base`, or where nobody says it beside the model that they name. Throws InputError for what is
// missing, malformed, or no model that Tessera can be; Error (usage) for a base of something else than adapters. Cost:
// headers are read and tensors mapped; a checkpoint's files are hashed.
using Base = std::optional<std::string>;
Pretrained open_pretrained(const std::filesystem::path& from, const Base& base = {});
// The base of adapters: its canonical path and its hash, XXH3-64 over the names, shapes and float32 values of its
// tensors, which is computed if it was not recorded (all of it is read). `named` names the adapters. Throws InputError
// if the base at that path has another hash, or if several directories may be meant.
struct KnownBase {
  std::string path, hash;
};
KnownBase known_base(const Pretrained& adapters, const std::filesystem::path& named);
// Writes into the options of a run with adapters what their base is, or checks that a resumed run has the same.
void record_base(TrainOptions& options);

// The directory with the tokenizer: that of the adapters if it has one, of the checkpoint, of the model, or of its
// file.
std::filesystem::path tokenizer_path(const std::filesystem::path& from, const Base& base = {});
// Its notes are said. With `trains` throws InputError for adapters that LoraConfig cannot describe.
ModelConfig pretrained_config(const std::filesystem::path& from, const Base& base = {}, bool trains = false);
// False in all processes of an MPI job but the first.
bool speaks_for_all();
// Says notes on standard error, a line each, where this process speaks for all.
void say_notes(const std::vector<std::string>& notes);

// The model of --init as a run of these options begins with it: with a row of its table for each of --add-tokens. Its
// notes are said. Throws as open_pretrained() does, and Error (usage) for new tokens beside adapters, which train none.
ModelConfig first_config(const TrainOptions& options);

// Its tensors for a model of `config`: adapters that only the latter has keep their first values, what it holds in nf4
// is quantised, and rows that only its table has are the mean of the others.
FullTensors first_weights(const Pretrained& from, const ModelConfig& config);

// A model of `config` that first_weights() will fill: nothing is drawn but values of adapters. To draw all takes a core
// some 40 s for a billion parameters.
std::unique_ptr<LanguageModel> first_model(const ModelConfig& config);

// Writes the sizes of a model into the options. Throws Error (usage) for an option that says another one. A smaller
// context stays: rotary positions know no length, and of a table of them the first rows are read.
void take_model(TrainOptions& options, const ModelConfig& config);

// The commands ask for the memory that they will use, before they draw or write anything.

// Before data are read. Throws Error (usage) as below.
void check_minimum_memory(const Job& job);
// For `ranks` ranks of this host from rank `first` on; the vocabulary is that of the tokens where the job has none. On
// ranks that compute on GPUs nothing is asked. Throws Error (usage) where memory does not suffice, after a table on
// standard error.
void check_memory_for_training(const TrainOptions& options, const Job& job, int64_t vocab, HostMemory here);
// Asks for the memory of a plan and of the oracle beside it.
void check_memory_for_verifying(const Job& job);
// Asks for the memory of a model that only computes.
void check_memory_for_inference(const Job& job);
// Sizes in a file cost nothing: throws InputError, naming both files, where the model that `config` describes has many
// times the bytes of any `model.safetensors` in `folder` or in a checkpoint there. A vocabulary that is not known is 1.
void check_described(const std::filesystem::path& config, const std::filesystem::path& folder, const Job& job,
                     int64_t vocab = 1);

// A model that only computes, opened for a plan: what `generate`, `evaluate` and `checkpoint quantize` share.

struct Inference {
  Pretrained from;
  TrainOptions run;  // the options that say the same
  Job job;           // a model without gradients
  std::unique_ptr<Tokenizer> tokenizer;
};

// `words` are options of a run; without a word of ranks there is one. Says what was passed over on standard error.
// Throws Error (usage), InputError, and Error where memory does not suffice.
Inference open_inference(const std::string& from, const Args& words);

// This rank's part of it. The inference must outlive the result.
std::unique_ptr<Trainer> inference_trainer(const Inference& inference, Communicator& world);

}  // namespace tessera
