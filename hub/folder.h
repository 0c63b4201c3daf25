// A model's folder in the form of the Hugging Face hub: config.json, and its tensors in model.safetensors or in shards
// that model.safetensors.index.json names. Files are mapped: of a tensor only what is asked for is read. Files of
// Python's pickle are never opened.
#pragma once
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hub/config.h"
#include "hub/names.h"
#include "train/whole_state.h"

namespace tessera {

// Whether a folder has a config.json and is no run of Tessera's.
bool is_hub_folder(const std::filesystem::path& folder);

class HubFolder {
 public:
  // Throws InputError naming the file and the key or tensor: one that is missing, one that no model of the family has,
  // one of another shape, shards that name each other's tensors, or a name that leads out of the folder.
  explicit HubFolder(const std::filesystem::path& folder);
  const std::filesystem::path& path() const { return path_; }
  const ModelConfig& config() const { return config_; }
  // That most elements are stored in; float32 for float16, which no op takes.
  DType dtype() const { return dtype_; }
  // By our names, in any floating dtype, rounded once. This must outlive it.
  WholeTensors tensors() const;

 private:
  void open_files();
  void check_names();
  const TensorBytes& stored(const std::string& name) const;

  std::filesystem::path path_;
  ModelConfig config_;
  DType dtype_ = DType::float32;
  std::vector<HubTensor> table_;
  std::map<std::string, const HubTensor*> by_name_;
  std::vector<std::unique_ptr<Safetensors>> files_;
  std::map<std::string, const TensorBytes*> tensors_;  // by the names of hub_tensors()
};

// The shards by tensor: model.safetensors.index.json, whose "weight_map" gives each tensor a file beside it. `what`
// names it. Throws InputError.
std::map<std::string, std::string> parse_hub_index(std::string_view json, const std::string& what);

// Writes config.json and model.safetensors of a model, in `dtype`, into a folder that is there. Holds one tensor in
// memory at a time. Throws OutputError, and Error for a model that the hub has no family for.
void write_hub_folder(const std::filesystem::path& folder, const ModelConfig& config, DType dtype,
                      const WholeTensors& source, DType stored);

}  // namespace tessera
