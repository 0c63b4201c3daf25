// Datasets: opening and validation.
#include "data/dataset.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/bad_input.h"
#include "base/json.h"
#include "data/examples.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

using Json = nlohmann::json;

int64_t integer(const Json& json, const char* section, const char* key, const std::string& what) {
  if (const std::optional<int64_t> value = natural(value_at(value_at(json, section), key))) return *value;
  bad_input("{}: the key '{}.{}' must be a non-negative integer", what, section, key);
}

int64_t longest_token(const Tokenizer& tokenizer) {
  int64_t longest = 0;
  for (int32_t token = 0; token < tokenizer.vocab_size(); ++token)
    longest = std::max(longest, std::ssize(tokenizer.decode(std::span(&token, 1))));
  return longest;
}

// Shards must be in the directory of dataset.json.
std::vector<std::string> files_in(const Json& train, const std::string& what) {
  std::vector<std::string> out;
  const Json list = train.value("files", Json::array({"train.tok"}));
  if (list.is_array())
    for (const Json& name : list)
      if (name.is_string()) out.push_back(name.get<std::string>());
  if (out.empty() || out.size() != list.size())
    throw InputError(what + ": the key 'train.files' must be a non-empty list of names");
  for (const std::string& name : out)
    if (!name.ends_with(".tok") || name.find('/') != std::string::npos)
      bad_input("{}: train.files: expected names of .tok files in the same directory, got '{}'", what, name);
  if (std::set<std::string>(out.begin(), out.end()).size() != out.size())
    throw InputError(what + ": train.files: duplicate name");
  return out;
}

}  // namespace

std::map<std::string, std::string> Dataset::checksums() const {
  const auto hex = [](uint64_t sum) { return fmt::format("{:016x}", sum); };
  std::string data, validation;
  for (const MixturePart& p : parts) {
    const auto sums = p.dataset->checksums();
    data += fmt::format("{} of {},", p.ratio, sums.at("data"));
    validation += sums.at("validation") + ",";
  }
  if (train.size() > 1)
    for (const TokenFile& f : train) data += hex(f.checksum()) + ",";
  const auto of = [&](const std::string& several, const auto& one) {
    return hex(several.empty() ? one() : checksum(several));
  };
  return {{"data", of(data, [&] { return train_examples ? train_examples->checksum() : train.at(0).checksum(); })},
          {"validation", of(validation, [&] { return val_examples ? val_examples->checksum() : val.checksum(); })},
          {"vocabulary", hex(checksum(tokenizer->to_json()))}};
}

void Dataset::check_tokens(int64_t rows) const {
  if (rows == 0 || rows >= tokenizer->vocab_size()) return;
  for (const MixturePart& p : parts) p.dataset->check_tokens(rows);
  std::vector<const TokenFile*> files{&val};
  for (const TokenFile& f : train) files.push_back(&f);
  for (const TokenFile* f : files)
    f->chunks(0, f->size(), [&](std::span<const int32_t> tokens) {
      check_in_table(tokens, rows, *tokenizer, train.size() > 1 ? f->name() : source);
    });
}

int64_t token_bytes(const TokenFile& tokens, int64_t begin, int64_t end, const Tokenizer& tokenizer) {
  std::vector<int64_t> sizes;  // per token; 0 for special tokens
  for (int32_t token = 0; token < tokenizer.vocab_size(); ++token) {
    const std::string text = tokenizer.token_bytes(token);
    sizes.push_back(tokenizer.special(text) == token ? 0 : std::ssize(text));
  }
  int64_t bytes = 0;
  tokens.chunks(begin, end, [&](std::span<const int32_t> all) {
    for (const int32_t token : all) {
      const bool first = bytes == 0;  // decoding may strip the space of the first token
      bytes += sizes.at(static_cast<size_t>(token));
      if (first && bytes > 0) bytes = std::ssize(tokenizer.decode(std::span(&token, 1)));
    }
  });
  return bytes;
}

double Dataset::bits_per_byte(double nats_per_token) const {
  if (!parts.empty()) {
    double bytes = 0, ratios = 0;
    for (const MixturePart& p : parts) {
      bytes += static_cast<double>(p.ratio) / p.dataset->bits_per_byte(std::log(2.0));
      ratios += static_cast<double>(p.ratio);
    }
    return nats_per_token / std::log(2.0) * ratios / bytes;
  }
  const int64_t tokens = val_examples ? val_examples->targets() : val.size();
  return nats_per_token / std::log(2.0) * static_cast<double>(tokens) / static_cast<double>(val_bytes);
}

int64_t Dataset::train_tokens() const {
  int64_t sum = train_examples ? train_examples->tokens() : 0;
  for (const TokenFile& f : train) sum += f.size();
  for (const MixturePart& p : parts) sum += p.dataset->train_tokens();
  return sum;
}

int64_t Dataset::val_tokens() const {
  int64_t sum = val_examples ? val_examples->tokens() : val.size();
  for (const MixturePart& p : parts) sum += p.dataset->val_tokens();
  return sum;
}

bool Dataset::has_examples() const {
  return train_examples != nullptr || (!parts.empty() && parts[0].dataset->has_examples());
}

std::vector<int32_t> Dataset::prompt() const {
  if (!parts.empty()) return parts[0].dataset->prompt();
  return val_examples ? val_examples->prompt() : std::vector<int32_t>(1, val[0]);
}

std::shared_ptr<const Rows> Dataset::validation(int64_t context) const {
  if (!parts.empty())
    throw Error("[dataset] expected a single dataset, got a mixture: validate its components separately");
  if (val_examples) return val_examples;
  return std::make_shared<Windows>(val, context);
}

DatasetDescription parse_description(std::string_view text, const std::string& what) {
  const Json json = parse_json(text, what);
  if (value_at(json, "format") != kDatasetFormat || value_at(json, "version") != 1)
    bad_input("{}: expected \"format\": \"{}\" and \"version\": 1", what, kDatasetFormat);
  if (!value_at(json, "source").is_string()) throw InputError(what + ": the key 'source' must be a string");
  DatasetDescription d{json["source"].get<std::string>(),    integer(json, "train", "bytes", what),
                       integer(json, "val", "bytes", what),  integer(json, "train", "tokens", what),
                       integer(json, "val", "tokens", what), files_in(json["train"], what)};
  if (const Json& note = value_at(json, "note"); note.is_string()) d.note = note.get<std::string>();
  if (d.train_bytes < 1 || d.val_bytes < 1) throw InputError(what + ": expected at least one byte per split");
  return d;
}

Dataset Dataset::open(const fs::path& directory) {
  const std::string what = (directory / "dataset.json").string();
  if (!is_there(what)) bad_input("{} is not a dataset: it has no dataset.json", directory.string());
  const DatasetDescription description = parse_description(read_file(what), what);
  Dataset d;
  d.source = description.source;
  d.directory = directory;
  for (const std::string& name : description.train_files) d.train.push_back(TokenFile::open(directory / name));
  d.val = TokenFile::open(directory / "val.tok");
  d.tokenizer = Tokenizer::load(directory / "tokenizer.json");
  d.train_bytes = description.train_bytes;
  d.val_bytes = description.val_bytes;
  if (!description.note.empty()) d.notes.push_back(description.note);
  const auto same = [&](std::string_view name, int64_t expected, int64_t found) {
    if (found != expected) bad_input("{}: {} is {}, but {} in the other files", what, name, expected, found);
  };
  same("train.tokens", description.train_tokens, d.train_tokens());
  same("val.tokens", description.val_tokens, d.val.size());
  const int64_t vocab = d.tokenizer->vocab_size();
  for (size_t i = 0; i < d.train.size(); ++i)
    if (d.train[i].vocab_size() != vocab || d.val.vocab_size() != vocab)
      bad_input("{}: the vocabularies differ: {} {}, val.tok {}, tokenizer.json {}", directory.string(),
                description.train_files[i], d.train[i].vocab_size(), d.val.vocab_size(), vocab);
  const int64_t longest = longest_token(*d.tokenizer);
  for (const auto& [split, bytes, tokens] :
       {std::tuple("train", d.train_bytes, d.train_tokens()), {"val", d.val_bytes, d.val.size()}})
    if (bytes > tokens * longest)
      bad_input("{}: {}.bytes is {}; expected at most {}, for {} tokens of at most {} bytes", what, split, bytes,
                tokens * longest, tokens, longest);
  return d;
}

}  // namespace tessera
