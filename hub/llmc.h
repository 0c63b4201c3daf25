// A GPT-2 in a file of llm.c (github.com/karpathy/llm.c, train_gpt2.py): 256 int32, of which the first are a magic
// number, a version, the context, the vocabulary, layers, heads, channels and rows of the token table; then the
// tensors, each kind for all layers, with weights as (out, in) and a table that is filled up below the vocabulary.
#pragma once

#include "train/checkpoint/state.h"

namespace tessera {

bool is_llmc_model(const std::filesystem::path& file);

class LlmcModel {
 public:
  // The file is mapped. Throws InputError naming it: another version, sizes that no model has, another length.
  explicit LlmcModel(const std::filesystem::path& file);
  const ModelConfig& config() const { return config_; }
  DType dtype() const { return dtype_; }
  // By our names, in any floating dtype, rounded once. This must outlive it.
  FullTensors tensors() const;

 private:
  std::string what_;
  MappedFile file_;
  ModelConfig config_;
  DType dtype_ = DType::float32;
  std::map<std::string, std::pair<Shape, size_t>> places_;  // shapes, and where the bytes begin
};

}  // namespace tessera
