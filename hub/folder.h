// Hugging Face model directories: config.json, and tensors in model.safetensors or in the shards listed in
// model.safetensors.index.json; layers may be GPTQ 4-bit. Files are mapped, and only requested rows are read. Python
// pickle files are never opened.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hub/config.h"
#include "train/checkpoint/state.h"

namespace tessera {

// Converts elements of `from` (floating or float16) from `begin` on until `to` is full, rounding once.
void convert(const TensorBytes& from, int64_t begin, DType dtype, std::span<std::byte> to);
// As convert(), for the transpose of `from`, which has two dimensions.
void convert_transposed(const TensorBytes& from, int64_t begin, DType dtype, std::span<std::byte> to);

// Whether a directory contains config.json and is not a Tessera run.
bool is_hub_folder(const std::filesystem::path& folder);

// Removes the affixes of training wrappers: torch.compile(), FSDP, activation checkpointing, DDP.
std::string unwrapped(std::string name);
std::string wrapped_note(const std::filesystem::path& from, const std::string& name, const std::string& plain);
// "; NAME is a GGUF model (llama.cpp), which is not supported: ...": identifies another program's file or checkpoint,
// and explains how to convert it. Empty if nothing is recognized.
std::string foreign_in(const std::filesystem::path& path);
// The message names weights in other formats if present.
[[noreturn]] void refuse_without(const std::filesystem::path& folder, const std::string& missing);

class HubFolder {
 public:
  // Throws InputError naming the file and the key or tensor that is missing, unknown to the model family, of wrong
  // shape, duplicate or outside the directory.
  explicit HubFolder(const std::filesystem::path& folder);
  const std::vector<std::string>& notes() const { return notes_; }
  const std::filesystem::path& path() const { return path_; }
  const ModelConfig& config() const { return config_; }
  // The dtype of most elements; float32 for float16, which no op supports.
  DType dtype() const { return dtype_; }
  // Readers by Tessera's names, in any floating dtype, rounded once; 4-bit layers are dequantized. Must not outlive the
  // HubFolder.
  FullTensors tensors() const;
  const std::optional<GptqConfig>& gptq() const { return gptq_; }
  // Whether all hub tensors of a Tessera tensor are 4-bit and fit an Int4Matrix. Cost: names only.
  bool has_codes(const std::string& name) const;
  // All rows; nullopt if any hub tensor is not 4-bit.
  std::optional<Int4Matrix> codes(const std::string& name) const;

 private:
  void open_files();
  void check_names();
  bool open_codes(const HubTensor& ours, const HubTensor::Slice& slice);
  TensorReader slice_reader(const HubTensor::Slice& slice, DType dtype) const;
  const TensorBytes& stored(const std::string& name) const;

  std::filesystem::path path_;
  std::vector<std::string> notes_;
  std::optional<GptqConfig> gptq_;
  ModelConfig config_;
  DType dtype_ = DType::float32;
  std::vector<HubTensor> table_;
  std::map<std::string, const HubTensor*> by_name_;
  std::vector<std::unique_ptr<Safetensors>> files_;
  std::map<std::string, const TensorBytes*> tensors_;  // by name in hub_tensors()
  std::map<std::string, GptqLayer> codes_;             // by the name of the weight that they replace
};

// The file of each tensor: "weight_map" of model.safetensors.index.json. `what` names the file. Throws InputError.
std::map<std::string, std::string> parse_hub_index(std::string_view json, const std::string& what);

struct HubWeights {
  DType dtype = DType::float32;   // of the written file
  FullTensors tensors;            // by Tessera's names
  DType stored = DType::float32;  // in which `tensors` are read
  // Weights to write as 4-bit codes, by Tessera's names.
  std::map<std::string, Int4Matrix> codes = {};
  GptqConfig gptq = {};
};

// Writes config.json, model.safetensors and, if there are codes, quantize_config.json into an existing directory, one
// tensor at a time. Throws OutputError; Error for a model without a hub family.
void write_hub_folder(const std::filesystem::path& folder, const ModelConfig& config, const HubWeights& weights);

}  // namespace tessera
