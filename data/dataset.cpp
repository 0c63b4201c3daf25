// Writing and opening datasets.
#include "data/dataset.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <tuple>

#include "data/bpe/bpe_tokenizer.h"
#include "data/examples.h"
#include "data/files.h"
#include "data/json.h"
#include "data/loader.h"
#include "data/write_dataset.h"
#include "tensor/error.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

using Json = nlohmann::json;
constexpr std::string_view kFormat = "tessera dataset";

// A non-negative integer at json[part][key].
int64_t integer(const Json& json, const char* part, const char* key, const std::string& what) {
  if (json.contains(part) && json[part].is_object() && json[part].contains(key)) {
    if (const std::optional<int64_t> value = natural(json[part][key])) return *value;
  }
  throw InputError(fmt::format("{}: the key '{}.{}' must be a non-negative integer", what, part, key));
}

int64_t longest_token(const Tokenizer& tokenizer) {
  int64_t longest = 0;
  for (int32_t token = 0; token < tokenizer.vocab_size(); ++token)
    longest = std::max(longest, std::ssize(tokenizer.decode(std::span(&token, 1))));
  return longest;
}

// Moves a finished directory to its name. False when another process was first.
bool publish(const fs::path& finished, const fs::path& directory) {
  std::error_code error;
  fs::rename(finished, directory, error);
  if (!error) return true;
  if (fs::exists(directory)) return false;
  throw OutputError(fmt::format("cannot make the dataset {}: {}", directory.string(), error.message()));
}

}  // namespace

std::map<std::string, std::string> Dataset::checksums() const {
  const auto hex = [](uint64_t sum) { return fmt::format("{:016x}", sum); };
  return {{"data", hex(train_examples ? train_examples->checksum() : train.checksum())},
          {"validation", hex(val_examples ? val_examples->checksum() : val.checksum())},
          {"vocabulary", hex(checksum(tokenizer->to_json()))}};
}

double Dataset::bits_per_byte(double nats_per_token) const {
  const int64_t tokens = val_examples ? val_examples->targets() : val.size();
  return nats_per_token / std::log(2.0) * static_cast<double>(tokens) / static_cast<double>(val_bytes);
}

int64_t Dataset::train_tokens() const { return train_examples ? train_examples->tokens() : train.size(); }
int64_t Dataset::val_tokens() const { return val_examples ? val_examples->tokens() : val.size(); }

std::vector<int32_t> Dataset::prompt() const {
  return val_examples ? val_examples->prompt() : std::vector<int32_t>(1, val[0]);
}

std::shared_ptr<const Rows> Dataset::validation(int64_t context) const {
  if (val_examples) return val_examples;
  return std::make_shared<Windows>(val, context);
}

DatasetDescription parse_description(std::string_view text, const std::string& what) {
  const Json json = parse_json(text, what);
  if (!json.is_object() || json.value("format", Json()) != kFormat || json.value("version", Json()) != 1)
    throw InputError(fmt::format("{}: expected \"format\": \"{}\" and \"version\": 1", what, kFormat));
  if (!json.value("source", Json()).is_string()) throw InputError(what + ": the key 'source' must be a string");
  DatasetDescription d{json["source"].get<std::string>(), integer(json, "train", "bytes", what),
                       integer(json, "val", "bytes", what), integer(json, "train", "tokens", what),
                       integer(json, "val", "tokens", what)};
  if (d.train_bytes < 1 || d.val_bytes < 1) throw InputError(what + ": a split of 0 bytes");
  return d;
}

Dataset Dataset::open(const fs::path& directory) {
  const std::string what = (directory / "dataset.json").string();
  std::error_code error;
  if (!fs::exists(what, error))
    throw InputError(fmt::format("{} is no dataset: it has no dataset.json", directory.string()));
  const DatasetDescription said = parse_description(read_file(what), what);
  Dataset d;
  d.source = said.source;
  d.directory = directory;
  d.train = TokenFile::open(directory / "train.tok");
  d.val = TokenFile::open(directory / "val.tok");
  d.tokenizer = Tokenizer::load(directory / "tokenizer.json");
  d.train_bytes = said.train_bytes;
  d.val_bytes = said.val_bytes;
  const auto same = [&](std::string_view name, int64_t expected, int64_t found) {
    if (found != expected)
      throw InputError(fmt::format("{}: {} is {} there and {} in the other files", what, name, expected, found));
  };
  same("train.tokens", said.train_tokens, d.train.size());
  same("val.tokens", said.val_tokens, d.val.size());
  const int64_t vocab = d.tokenizer->vocab_size();
  if (d.train.vocab_size() != vocab || d.val.vocab_size() != vocab)
    throw InputError(fmt::format("{}: the vocabularies differ: train.tok {}, val.tok {}, tokenizer.json {}",
                                 directory.string(), d.train.vocab_size(), d.val.vocab_size(), vocab));
  const int64_t longest = longest_token(*d.tokenizer);
  for (const auto& [split, bytes, tokens] :
       {std::tuple("train", d.train_bytes, d.train.size()), {"val", d.val_bytes, d.val.size()}})
    if (bytes > tokens * longest)
      throw InputError(fmt::format("{}: {}.bytes is {}; expected at most {}, for {} tokens of at most {} bytes", what,
                                   split, bytes, tokens * longest, tokens, longest));
  return d;
}

bool write_dataset(const Tokens& t, const fs::path& named) {
  fs::path directory = fs::absolute(named).lexically_normal();
  if (!directory.has_filename()) directory = directory.parent_path();  // "name/"
  make_directories(directory.parent_path());
  remove_stale(directory.parent_path(), false);
  const TemporaryDirectory beside(directory);
  const fs::path made = beside.path() / "dataset";
  make_directories(made);
  const int64_t vocab = t.tokenizer->vocab_size();
  TokenFile::write(made / "train.tok", t.train, vocab);
  TokenFile::write(made / "val.tok", t.val, vocab);
  write_file(made / "tokenizer.json", t.tokenizer->to_json());
  if (const auto* const bpe = dynamic_cast<const BpeTokenizer*>(t.tokenizer.get())) {
    write_file(made / "vocab.json", bpe->vocab_json());
    write_file(made / "merges.txt", bpe->merges_txt());
  }
  const Json description = {{"format", kFormat},
                            {"version", 1},
                            {"source", t.source},
                            {"tokenizer", t.tokenizer->kind()},
                            {"vocab_size", vocab},
                            {"train", {{"tokens", t.train.size()}, {"bytes", t.train_bytes}}},
                            {"val", {{"tokens", t.val.size()}, {"bytes", t.val_bytes}}}};
  // A file name need not be UTF-8; JSON must be.
  write_file(made / "dataset.json", description.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  return publish(made, directory);
}

}  // namespace tessera
