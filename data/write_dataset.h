// Tokens on their way into a dataset directory.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "data/files.h"
#include "data/tokenizer.h"

namespace tessera {

struct Tokens {
  std::vector<int32_t> train = {}, val = {};
  size_t train_bytes = 0, val_bytes = 0;  // bytes of the text that the tokens mean
};

// Writes the files beside the directory and moves them there in the end. Everything throws OutputError.
class DatasetWriter {
 public:
  // With `shard_tokens` the tokens to train on are cut into files of so many, the last of up to twice as many, which
  // are written as soon as they are full; 0: one file.
  DatasetWriter(const std::filesystem::path& directory, std::string source, std::shared_ptr<const Tokenizer> tokenizer,
                int64_t shard_tokens = 0);
  void add(const Tokens& tokens);
  // False when the name was taken meanwhile.
  bool finish();

 private:
  void write_shard(size_t tokens);

  std::filesystem::path directory_;
  std::string source_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  size_t shard_tokens_;
  TemporaryDirectory beside_;
  std::vector<int32_t> train_ = {}, val_ = {};  // that are not written
  size_t train_tokens_ = 0, train_bytes_ = 0, val_bytes_ = 0;
  std::vector<std::string> train_files_ = {};
};

}  // namespace tessera
