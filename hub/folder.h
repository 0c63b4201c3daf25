// A model's folder in the form of the Hugging Face hub: config.json, and its tensors in model.safetensors or in shards
// that model.safetensors.index.json names; layers may be in GPTQ's 4 bits. Files are mapped: of a tensor only what is
// asked for is read. Files of Python's pickle are never opened.
#pragma once

#include "hub/config.h"
#include "train/checkpoint/state.h"

namespace tessera {

// --- stored numbers in another dtype, rounded once ---
// Elements of `from`, floating or float16, from the one at `begin` on, as many of `dtype` as `to` has room for.
void convert(const TensorBytes& from, int64_t begin, DType dtype, std::span<std::byte> to);
// Elements of the transpose of `from`, which has two dims, in the same way.
void convert_transposed(const TensorBytes& from, int64_t begin, DType dtype, std::span<std::byte> to);

// --- folders ---
// Whether a folder has a config.json and is no run of Tessera's.
bool is_hub_folder(const std::filesystem::path& folder);

// The name of a tensor without what training wrappers leave in it: torch.compile(), FSDP, checkpointing, and DDP.
std::string unwrapped(std::string name);
// The line that says so.
std::string wrapped_note(const std::filesystem::path& from, const std::string& name, const std::string& plain);
// "; NAME is a GGUF model of llama.cpp, which is not read: ..." of a path, or of what is in a directory: what another
// program's file or checkpoint is, and how it is converted. Empty where nothing is known.
std::string foreign_in(const std::filesystem::path& path);
// Throws InputError about missing weights, naming those of other formats that are there.
[[noreturn]] void refuse_without(const std::filesystem::path& folder, const std::string& missing);

class HubFolder {
 public:
  // Throws InputError naming the file and the key or tensor: one that is missing, one that no model of the family has,
  // one of another shape, one that is there twice, or a name that leads out of the folder.
  explicit HubFolder(const std::filesystem::path& folder);
  // Lines for the user: keys that are not read, and so on.
  const std::vector<std::string>& notes() const { return notes_; }
  const std::filesystem::path& path() const { return path_; }
  const ModelConfig& config() const { return config_; }
  // The dtype that most elements are stored in; float32 for float16, which no op takes.
  DType dtype() const { return dtype_; }
  // By our names, in any floating dtype, rounded once: of layers in 4 bits what their codes stand for. This must
  // outlive it.
  FullTensors tensors() const;
  // Where layers are in 4 bits.
  const std::optional<GptqConfig>& gptq() const { return gptq_; }
  // Whether all that a tensor of our name is made of is in 4 bits that an Int4Matrix can hold. Cost: names only.
  bool has_codes(const std::string& name) const;
  // A tensor's codes, by our name, all rows of all that it is made of; nothing where not all of these are in 4 bits.
  std::optional<Int4Matrix> codes(const std::string& name) const;

 private:
  void open_files();
  void check_names();
  bool open_codes(const HubTensor& ours, const HubTensor::Piece& piece);
  TensorReader piece_reader(const HubTensor::Piece& piece, DType dtype) const;
  const TensorBytes& stored(const std::string& name) const;

  std::filesystem::path path_;
  std::vector<std::string> notes_;
  std::optional<GptqConfig> gptq_;
  ModelConfig config_;
  DType dtype_ = DType::float32;
  std::vector<HubTensor> table_;
  std::map<std::string, const HubTensor*> by_name_;
  std::vector<std::unique_ptr<Safetensors>> files_;
  std::map<std::string, const TensorBytes*> tensors_;  // by the names of hub_tensors()
  std::map<std::string, GptqLayer> codes_;             // by those of the weights that they stand for
};

// The shards by tensor: model.safetensors.index.json, whose "weight_map" gives each tensor a file beside it. `what`
// names it. Throws InputError.
std::map<std::string, std::string> parse_hub_index(std::string_view json, const std::string& what);

// A model to write.
struct HubWeights {
  DType dtype = DType::float32;   // that is written
  FullTensors tensors;            // by our names
  DType stored = DType::float32;  // that they are read in
  // Weights that are written in 4 bits, by our names.
  std::map<std::string, Int4Matrix> codes = {};
  GptqConfig gptq = {};
};

// Writes config.json and model.safetensors of a model into a folder that is there; and quantize_config.json where there
// are codes. Holds one tensor in memory at a time. Throws OutputError, and Error for a model that the hub has no family
// for.
void write_hub_folder(const std::filesystem::path& folder, const ModelConfig& config, const HubWeights& weights);

}  // namespace tessera
