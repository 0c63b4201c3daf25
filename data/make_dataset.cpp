// Making datasets from texts and token files, and the cache of those made.
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <span>

#include "data/dataset.h"
#include "data/files.h"
#include "data/jsonl.h"
#include "data/known_texts.h"
#include "data/llmc_file.h"
#include "data/text_file.h"
#include "data/write_dataset.h"
#include "tensor/error.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

Tokens tokenize(const Text& text, const TokenizerChoice& choice) {
  const Split split = split_text(text);
  Tokens t{.source = text.name, .tokenizer = make_tokenizer(choice, text.bytes, split.train, text.name)};
  t.train = t.tokenizer->encode(split.train);
  t.val = t.tokenizer->encode(split.val);
  t.train_bytes = split.train.size();
  t.val_bytes = split.val.size();
  return t;
}

// The file to validate on: "train" in the last part of the name replaced by "val".
std::optional<fs::path> validation_of(const fs::path& file) {
  std::string name = file.filename().string();
  const size_t at = name.rfind("train");
  if (at == std::string::npos) return std::nullopt;
  const fs::path val = file.parent_path() / name.replace(at, 5, "val");
  return is_llmc_file(val) ? std::optional(val) : std::nullopt;
}

std::vector<int32_t> read_llmc(const fs::path& file, int64_t vocab) {
  const std::string bytes = read_file(file);
  return parse_llmc(std::as_bytes(std::span(bytes)), vocab, file.string());
}

void require_folder(const fs::path& file, const TokenizerChoice& choice) {
  if (choice.name.empty() || choice.name == "char" || choice.name == "bytes" || choice.name == "bpe")
    throw Error(fmt::format(
        "`tokenizer`: expected the folder with the tokenizer.json, or the vocab.json and merges.txt, that {} was made "
        "with, found {}",
        file.string(), choice.name.empty() ? "none" : "'" + choice.name + "'"));
}

Tokens tokens_of_llmc(const fs::path& file, const TokenizerChoice& choice) {
  Tokens t{.source = file.string(), .tokenizer = make_tokenizer(choice, "", "", file.string())};
  t.train = read_llmc(file, t.tokenizer->vocab_size());
  if (const std::optional<fs::path> val = validation_of(file)) {
    t.val = read_llmc(*val, t.tokenizer->vocab_size());
  } else {
    const auto cut = static_cast<std::ptrdiff_t>(t.train.size() * 9 / 10);
    t.val.assign(t.train.begin() + cut, t.train.end());
    t.train.resize(static_cast<size_t>(cut));
  }
  if (t.train.size() < 2 || t.val.size() < 2)
    throw InputError(fmt::format("{}: {} tokens to train on and {} held out; expected at least 2 of each",
                                 file.string(), t.train.size(), t.val.size()));
  t.train_bytes = t.tokenizer->decode(t.train).size();
  t.val_bytes = t.tokenizer->decode(t.val).size();
  return t;
}

// Tokens and bytes of some documents, each with its end.
void add_documents(std::span<const std::string> documents, const Tokenizer& tokenizer, std::vector<int32_t>& tokens,
                   size_t& bytes) {
  const std::optional<int32_t> end = tokenizer.document_end();
  for (const std::string& document : documents) {
    const std::string text = end ? document : document + "\n\n";
    const std::vector<int32_t> own = tokenizer.encode(text);
    tokens.insert(tokens.end(), own.begin(), own.end());
    if (end) tokens.push_back(*end);
    bytes += text.size();
  }
}

Tokens tokens_of_documents(const fs::path& file, const TokenizerChoice& choice) {
  std::vector<std::string> documents;
  for_each_line(file, [&](std::string_view line, int64_t number) {
    const std::string where = fmt::format("{}:{}", file.string(), number);
    const Example example = parse_example(line, where);
    if (example.shape != Example::Shape::text)
      throw InputError(where +
                       ": expected a document, {\"text\": ...}; conversations are what a run of `train` reads itself");
    documents.push_back(example.turns.at(0).text);
  });
  if (documents.size() < 2)
    throw InputError(
        fmt::format("{}: {} documents; expected at least 2, one of them held out", file.string(), documents.size()));
  const std::span<const std::string> all(documents);
  const auto trained = all.first(all.size() - std::max<size_t>(all.size() / 10, 1)), held = all.subspan(trained.size());
  std::string text;
  for (const std::string& document : trained) text += document + "\n\n";
  const size_t learnt = text.size();
  for (const std::string& document : held) text += document + "\n\n";
  Tokens t{.source = file.string(),
           .tokenizer = make_tokenizer(choice, text, std::string_view(text).substr(0, learnt), file.string())};
  add_documents(trained, *t.tokenizer, t.train, t.train_bytes);
  add_documents(held, *t.tokenizer, t.val, t.val_bytes);
  return t;
}

void require_new(const fs::path& directory) {
  std::error_code error;
  if (fs::exists(directory, error))
    throw OutputError(fmt::format("the dataset {} exists already; give another name", directory.string()));
}

Dataset write_new(const Tokens& tokens, const fs::path& directory) {
  if (!write_dataset(tokens, directory))
    throw OutputError(fmt::format("the dataset {} appeared while it was made", directory.string()));
  return Dataset::open(directory);
}

// Names in the cache: the content, where its documents end, and the tokenizer.
std::string cache_key(const Text& text, const TokenizerChoice& choice) {
  const XXH128_hash_t content = XXH3_128bits(text.bytes.data(), text.bytes.size());
  const uint64_t cuts = XXH3_64bits(text.documents.data(), text.documents.size() * sizeof(Span));
  return fmt::format("{:016x}{:016x}{:016x}-{}", content.high64, content.low64, cuts, cache_name(choice));
}
std::string cache_key(const fs::path& file, const TokenizerChoice& choice) {
  const std::optional<fs::path> val = validation_of(file);
  return fmt::format("{:016x}{:016x}-{}", checksum_of(file), val ? checksum_of(*val) : 0, cache_name(choice));
}

Dataset open_fitting(const fs::path& directory, const TokenizerChoice& choice) {
  Dataset dataset = Dataset::open(directory);
  if (!fits(choice, *dataset.tokenizer))
    throw Error(fmt::format("`tokenizer` {}: the dataset {} was made with another one ({})", choice.name,
                            directory.string(), dataset.tokenizer->kind()));
  return dataset;
}

// The dataset of that name in the cache, made by `make` when it is not there or damaged.
template <class Make>
Dataset cached(const std::string& key, const std::string& source, const Make& make) {
  const fs::path directory = cache_directory() / "datasets" / key;
  remove_stale(cache_directory(), false);
  remove_stale(directory.parent_path(), false);
  std::error_code error;
  if (fs::exists(directory, error)) {
    try {
      Dataset found = Dataset::open(directory);
      found.source = source;  // the same content may have been met under another name
      return found;
    } catch (const InputError&) {
      fs::remove_all(directory, error);
    }
  }
  write_dataset(make(), directory);
  Dataset made = Dataset::open(directory);
  made.source = source;
  return made;
}

}  // namespace

Dataset make_dataset(const Text& text, const TokenizerChoice& choice, const fs::path& directory) {
  require_new(directory);
  return write_new(tokenize(text, choice), directory);
}

Dataset make_dataset_of_documents(const fs::path& file, const TokenizerChoice& choice, const fs::path& directory) {
  require_new(directory);
  return write_new(tokens_of_documents(file, choice), directory);
}

Dataset dataset_of_documents(const fs::path& file, const TokenizerChoice& choice) {
  return cached(cache_key(file, choice) + "-documents", file.string(),
                [&] { return tokens_of_documents(file, choice); });
}

Dataset import_llmc(const fs::path& file, const TokenizerChoice& choice, const fs::path& directory) {
  require_new(directory);
  require_folder(file, choice);
  return write_new(tokens_of_llmc(file, choice), directory);
}

Dataset dataset_for(const std::string& spec, const TokenizerChoice& choice) {
  std::optional<Text> text = known_text(spec);
  std::error_code error;
  if (!text && fs::is_directory(spec, error)) return open_fitting(spec, choice);
  if (!text && !fs::exists(spec, error))
    throw InputError(fmt::format(
        "`data` '{}': no such file or directory, and no known text (those are austen and tinyshakespeare)", spec));
  if (!text && is_llmc_file(spec)) {
    require_folder(spec, choice);
    return cached(cache_key(fs::path(spec), choice), spec, [&] { return tokens_of_llmc(spec, choice); });
  }
  if (!text) text = load_text_file(spec);
  return cached(cache_key(*text, choice), text->name, [&] { return tokenize(*text, choice); });
}

}  // namespace tessera
