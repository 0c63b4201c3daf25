// Tokens on their way into a dataset directory.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "data/tokenizer.h"

namespace tessera {

struct Tokens {
  std::string source;
  std::unique_ptr<Tokenizer> tokenizer;
  std::vector<int32_t> train = {}, val = {};
  size_t train_bytes = 0, val_bytes = 0;  // of the text that they mean
};

// Writes the files beside the directory and moves them there; false when the name was taken meanwhile. Throws
// OutputError.
bool write_dataset(const Tokens& tokens, const std::filesystem::path& directory);

}  // namespace tessera
