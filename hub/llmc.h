// GPT-2 checkpoints of llm.c (github.com/karpathy/llm.c, train_gpt2.py): a header of 256 int32 (magic number, version,
// context, vocabulary, layers, heads, channels, rows of the padded token embedding, ...), then the tensors, each
// parameter for all layers, with weights as (out, in).
#pragma once
#include <filesystem>
#include <map>
#include <string>

#include "train/checkpoint/full_state.h"

namespace tessera {

bool is_llmc_model(const std::filesystem::path& file);

class LlmcModel {
 public:
  // The file is mapped. Throws InputError naming the file for other versions, impossible sizes and a wrong file size.
  explicit LlmcModel(const std::filesystem::path& file);
  const ModelConfig& config() const { return config_; }
  DType dtype() const { return dtype_; }
  // Readers by Tessera's names, in any floating dtype, rounded once. Must not outlive the LlmcModel.
  FullTensors tensors() const;

 private:
  std::string what_;
  MappedFile file_;
  ModelConfig config_;
  DType dtype_ = DType::float32;
  std::map<std::string, std::pair<Shape, size_t>> places_;  // shapes and offsets in bytes
};

}  // namespace tessera
