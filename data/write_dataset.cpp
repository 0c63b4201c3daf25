// The files of a dataset directory.
#include "data/write_dataset.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "data/bpe/bpe_tokenizer.h"
#include "data/dataset.h"
#include "tensor/error.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

// "name/" is "name".
fs::path absolute_name(const fs::path& named) {
  fs::path directory = fs::absolute(named).lexically_normal();
  return directory.has_filename() ? directory : directory.parent_path();
}

fs::path with_parent(const fs::path& directory) {
  make_directories(directory.parent_path());
  remove_stale(directory.parent_path(), false);
  return directory;
}

// Moves a finished directory to its name. False when another process was first.
bool publish(const fs::path& finished, const fs::path& directory) {
  std::error_code error, unknown;
  fs::rename(finished, directory, error);
  if (!error) return true;
  if (fs::exists(directory, unknown)) return false;
  throw OutputError(fmt::format("cannot make the dataset {}: {}", directory.string(), error.message()));
}

}  // namespace

DatasetWriter::DatasetWriter(const fs::path& directory, std::string source, std::shared_ptr<const Tokenizer> tokenizer,
                             int64_t shard_tokens)
    : directory_(absolute_name(directory)),
      source_(std::move(source)),
      tokenizer_(std::move(tokenizer)),
      shard_tokens_(static_cast<size_t>(shard_tokens)),
      beside_(with_parent(directory_)) {
  make_directories(beside_.path() / "dataset");
}

void DatasetWriter::write_shard(size_t tokens) {
  const std::string name = shard_tokens_ > 0 ? fmt::format("train-{:05}.tok", train_files_.size()) : "train.tok";
  TokenFile::write(beside_.path() / "dataset" / name, std::span(train_).first(tokens), tokenizer_->vocab_size());
  train_.erase(train_.begin(), train_.begin() + static_cast<std::ptrdiff_t>(tokens));
  train_tokens_ += tokens;
  train_files_.push_back(name);
}

void DatasetWriter::add(const Tokens& t) {
  train_.insert(train_.end(), t.train.begin(), t.train.end());
  val_.insert(val_.end(), t.val.begin(), t.val.end());
  train_bytes_ += t.train_bytes;
  val_bytes_ += t.val_bytes;
  while (shard_tokens_ > 0 && train_.size() >= 2 * shard_tokens_) write_shard(shard_tokens_);
}

bool DatasetWriter::finish() {
  using Json = nlohmann::json;
  write_shard(train_.size());
  const fs::path made = beside_.path() / "dataset";
  const int64_t vocab = tokenizer_->vocab_size();
  TokenFile::write(made / "val.tok", val_, vocab);
  write_file(made / "tokenizer.json", tokenizer_->to_json());
  if (const auto* const bpe = dynamic_cast<const BpeTokenizer*>(tokenizer_.get())) {
    write_file(made / "vocab.json", bpe->vocab_json());
    write_file(made / "merges.txt", bpe->merges_txt());
  }
  Json train = {{"tokens", train_tokens_}, {"bytes", train_bytes_}};
  if (shard_tokens_ > 0) train["files"] = train_files_;
  const Json description = {{"format", kDatasetFormat},
                            {"version", 1},
                            {"source", source_},
                            {"tokenizer", tokenizer_->kind()},
                            {"vocab_size", vocab},
                            {"train", train},
                            {"val", {{"tokens", val_.size()}, {"bytes", val_bytes_}}}};
  // A file name need not be UTF-8; JSON must be.
  write_file(made / "dataset.json", description.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  return publish(made, directory_);
}

}  // namespace tessera
