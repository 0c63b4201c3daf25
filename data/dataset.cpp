// Making, caching and opening datasets.
#include "data/dataset.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "data/files.h"
#include "data/json.h"
#include "data/known_texts.h"
#include "data/text_file.h"
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

Json describe(const Text& text, const Tokenizer& tokenizer, const Split& split, size_t train, size_t val) {
  return {{"format", kFormat},
          {"version", 1},
          {"source", text.name},
          {"tokenizer", tokenizer.kind()},
          {"vocab_size", tokenizer.vocab_size()},
          {"train", {{"tokens", train}, {"bytes", split.train.size()}}},
          {"val", {{"tokens", val}, {"bytes", split.val.size()}}}};
}

// Moves a finished directory to its name. False when another process was first.
bool publish(const fs::path& finished, const fs::path& directory) {
  std::error_code error;
  fs::rename(finished, directory, error);
  if (!error) return true;
  if (fs::exists(directory)) return false;
  throw OutputError(fmt::format("cannot make the dataset {}: {}", directory.string(), error.message()));
}

// Writes the files beside the directory and moves them there; false when the name was taken meanwhile.
bool write_dataset(const Text& text, std::string_view kind, const fs::path& named) {
  fs::path directory = fs::absolute(named).lexically_normal();
  if (!directory.has_filename()) directory = directory.parent_path();  // "name/"
  const Split split = split_text(text);
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(kind, text.bytes, text.name);
  const std::vector<int32_t> train = tokenizer->encode(split.train), val = tokenizer->encode(split.val);
  make_directories(directory.parent_path());
  const TemporaryDirectory beside(directory.string() + ".tmp-");
  const fs::path made = beside.path() / "dataset";
  make_directories(made);
  TokenFile::write(made / "train.tok", train, tokenizer->vocab_size());
  TokenFile::write(made / "val.tok", val, tokenizer->vocab_size());
  write_file(made / "tokenizer.json", tokenizer->to_json());
  const Json description = describe(text, *tokenizer, split, train.size(), val.size());
  // A file name need not be UTF-8; JSON must be.
  write_file(made / "dataset.json", description.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  return publish(made, directory);
}

// The name in the cache: the content, where its documents end, and the tokenizer.
std::string cache_key(const Text& text, std::string_view kind) {
  const XXH128_hash_t content = XXH3_128bits(text.bytes.data(), text.bytes.size());
  const uint64_t cuts = XXH3_64bits(text.documents.data(), text.documents.size() * sizeof(Span));
  return fmt::format("{:016x}{:016x}{:016x}-{}", content.high64, content.low64, cuts, kind);
}

Dataset open_of_kind(const fs::path& directory, std::string_view kind) {
  Dataset dataset = Dataset::open(directory);
  if (!kind.empty() && kind != dataset.tokenizer->kind())
    throw Error(fmt::format("--tokenizer {}: the dataset {} was made with {}", kind, directory.string(),
                            dataset.tokenizer->kind()));
  return dataset;
}

}  // namespace

double Dataset::bits_per_byte(double nats_per_token) const {
  return nats_per_token / std::log(2.0) * static_cast<double>(val.size()) / static_cast<double>(val_bytes);
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
  return d;
}

Dataset make_dataset(const Text& text, std::string_view kind, const fs::path& directory) {
  std::error_code error;
  if (fs::exists(directory, error))
    throw OutputError(fmt::format("the dataset {} exists already; give another name", directory.string()));
  if (!write_dataset(text, kind, directory))
    throw OutputError(fmt::format("the dataset {} appeared while it was made", directory.string()));
  return Dataset::open(directory);
}

Dataset dataset_for(const std::string& spec, std::string_view kind) {
  std::optional<Text> text = known_text(spec);
  std::error_code error;
  if (!text && fs::is_directory(spec, error)) return open_of_kind(spec, kind);
  if (!text && !fs::exists(spec, error))
    throw InputError(fmt::format(
        "--data '{}': no such file or directory, and no known text (those are austen and tinyshakespeare)", spec));
  if (!text) text = load_text_file(spec);
  if (kind.empty()) kind = "char";
  const fs::path directory = cache_directory() / "datasets" / cache_key(*text, kind);
  if (fs::exists(directory, error)) {
    try {
      Dataset cached = open_of_kind(directory, kind);
      cached.source = text->name;  // the same content may have been met under another name
      return cached;
    } catch (const InputError&) {  // a damaged cache is made again
      fs::remove_all(directory, error);
    }
  }
  write_dataset(*text, kind, directory);
  Dataset made = open_of_kind(directory, kind);
  made.source = text->name;
  return made;
}

}  // namespace tessera
