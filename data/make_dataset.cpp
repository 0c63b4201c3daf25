// Makes and caches datasets of texts and token files.
#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/bad_input.h"
#include "data/dataset.h"
#include "data/json_rows.h"
#include "data/jsonl.h"
#include "data/shards.h"
#include "data/tokenizer/described.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

// Creates the parent and returns the absolute path ("name/" becomes "name").
fs::path with_parent(const fs::path& named) {
  fs::path directory = fs::absolute(named).lexically_normal();
  if (!directory.has_filename()) directory = directory.parent_path();
  make_directories(directory.parent_path());
  remove_stale(directory.parent_path(), false);
  return directory;
}

// Writes to a temporary directory, which finish() renames. All functions throw OutputError.
class DatasetWriter {
 public:
  // With `shard_tokens`, files have that many training tokens, the last up to twice as many. 0: one file.
  DatasetWriter(const fs::path& directory, std::string source, std::shared_ptr<const Tokenizer> tokenizer,
                int64_t shard_tokens = 0)
      : directory_(with_parent(directory)),
        source_(std::move(source)),
        tokenizer_(std::move(tokenizer)),
        shard_tokens_(shard_tokens),
        beside_(directory_) {
    make_directories(made_);
    begin_shard();
    val_.emplace(made_ / "val.tok", tokenizer_->vocab_size());
  }

  void add(std::span<const int32_t> tokens, bool held) {
    if (held) return val_->add(tokens);
    while (!tokens.empty()) {
      if (shard_tokens_ > 0 && train_.back().count() == shard_tokens_) begin_shard();
      const int64_t capacity = shard_tokens_ > 0 ? shard_tokens_ - train_.back().count() : std::ssize(tokens);
      const auto now = tokens.first(static_cast<size_t>(std::min(capacity, std::ssize(tokens))));
      train_.back().add(now);
      tokens = tokens.subspan(now.size());
    }
  }
  void add_names(const std::map<std::string, int64_t>& counts) {
    for (const auto& [name, count] : counts) names_[name] += count;
  }
  void add_bytes(int64_t bytes, bool held) { (held ? val_bytes_ : train_bytes_) += bytes; }

  // Returns false if the name was taken in the meantime.
  bool finish(bool special) {
    finish_shards();
    val_->finish();
    const int64_t vocab = tokenizer_->vocab_size();
    write_file(made_ / "tokenizer.json", tokenizer_->to_json());
    if (const auto* const bpe = dynamic_cast<const BpeTokenizer*>(tokenizer_.get())) {
      write_file(made_ / "vocab.json", bpe->vocab_json());
      write_file(made_ / "merges.txt", bpe->merges_txt());
    }
    nlohmann::json train = {{"tokens", train_tokens_}, {"bytes", train_bytes_}};
    if (shard_tokens_ > 0) train["files"] = train_files_;
    const nlohmann::json description = {{"format", kDatasetFormat},
                                        {"version", 1},
                                        {"source", source_},
                                        {"tokenizer", tokenizer_->kind()},
                                        {"vocab_size", vocab},
                                        {"train", train},
                                        {"val", {{"tokens", val_->count()}, {"bytes", val_bytes_}}},
                                        {"note", special_note(names_, special)}};
    // A file name need not be UTF-8, unlike JSON.
    write_file(made_ / "dataset.json",
               description.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    std::error_code error, unknown;
    fs::rename(made_, directory_, error);
    if (error && !fs::exists(directory_, unknown))
      throw OutputError(fmt::format("cannot create the dataset {}: {}", directory_.string(), error.message()));
    return !error;
  }

 private:
  // Keeps the previous shard open, to receive the tokens of a last shard that is too short.
  void begin_shard() {
    if (train_.size() == 2) finish_first();
    train_files_.push_back(shard_tokens_ > 0 ? fmt::format("train-{:05}.tok", train_files_.size()) : "train.tok");
    train_.emplace_back(made_ / train_files_.back(), tokenizer_->vocab_size());
  }
  void finish_first() {
    train_.front().finish();
    train_tokens_ += train_.front().count();
    train_.pop_front();
  }
  void finish_shards() {
    if (train_.size() == 2 && train_.back().count() < shard_tokens_) {
      const fs::path file = made_ / train_files_.back();
      train_.back().finish();
      const TokenFile last = TokenFile::open(file);
      last.chunks(0, last.size(), [&](std::span<const int32_t> tokens) { train_.front().add(tokens); });
      train_.pop_back(), train_files_.pop_back();
      fs::remove(file);
    }
    while (!train_.empty()) finish_first();
  }

  fs::path directory_;
  std::string source_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  int64_t shard_tokens_;
  TemporaryDirectory beside_;
  fs::path made_ = beside_.path() / "dataset";
  std::deque<TokenWriter> train_ = {};  // at most two, unfinished
  std::optional<TokenWriter> val_ = {};
  int64_t train_tokens_ = 0, train_bytes_ = 0, val_bytes_ = 0;
  std::vector<std::string> train_files_ = {};
  std::map<std::string, int64_t> names_ = {};  // of special tokens
};

struct Input {
  std::string name;
  TextWalk walk;  // over chunks or documents
  bool documents = false;
};

Input split_text(const Text& text, const HeldOut& held = {}) {
  int64_t out = 0;
  for (const Span& d : text.documents) out += held.of(d.end - d.begin);
  // Rejects a text that is too short before creating a directory; character alignment adds at most three bytes.
  if (held.file.empty() && std::min(out, text.size() - out) < 2 + 3 * std::ssize(text.documents))
    split_text(text, held, [](std::string_view, bool) {});
  if (held.file.empty()) return {text.name, [text, held](const SplitChunk& f) { split_text(text, held, f); }};
  return {text.name, [text, val = load_text_file(held.file)](const SplitChunk& f) {
            text.read([&](std::string_view chunk) { f(chunk, false); });
            val.read([&](std::string_view chunk) { f(chunk, true); });
          }};
}

// "train" in the last path component replaced by "val".
std::optional<fs::path> validation_path(const fs::path& file) {
  std::string name = file.filename().string();
  const size_t at = name.rfind("train");
  if (at == std::string::npos) return std::nullopt;
  const fs::path val = file.parent_path() / name.replace(at, 5, "val");
  return is_llmc_file(val) ? std::optional(val) : std::nullopt;
}

void write_llmc(const fs::path& file, const Tokenizer& tokenizer, DatasetWriter& writer) {
  const TokenFile all = TokenFile::open_llmc(file, tokenizer.vocab_size());
  std::optional<TokenFile> val;
  if (const std::optional<fs::path> val_file = validation_path(file))
    val = TokenFile::open_llmc(*val_file, tokenizer.vocab_size());
  const int64_t cut = val ? all.size() : all.size() * 9 / 10, held = val ? val->size() : all.size() - cut;
  if (cut < 2 || held < 2)
    bad_input("{}: {} training tokens and {} held out; expected at least 2 of each", file.string(), cut, held);
  const auto write = [&](const TokenFile& from, int64_t begin, int64_t end, bool is_held) {
    from.chunks(begin, end, [&](std::span<const int32_t> tokens) { writer.add(tokens, is_held); });
    writer.add_bytes(token_bytes(from, begin, end, tokenizer), is_held);
  };
  write(all, 0, cut, false);
  val ? write(*val, 0, held, true) : write(all, cut, all.size(), true);
}

void for_each_document(const fs::path& file, const std::function<void(const std::string& text)>& f) {
  for_each_line(file, [&](std::string_view line, int64_t number) {
    const std::string where = fmt::format("{}:{}", file.string(), number);
    const Example example = parse_example(line, where);
    if (example.shape != Example::Shape::text)
      throw InputError(where + ": expected a document, {\"text\": ...}; `train` reads conversations directly");
    f(example.turns.at(0).text);
  });
}

Input documents_in(const fs::path& file) {
  int64_t count = 0;
  for_each_document(file, [&](const std::string&) { ++count; });
  if (count < 2) bad_input("{}: {} documents; expected at least 2, one of them held out", file.string(), count);
  const int64_t train = count - std::max<int64_t>(count / 10, 1);
  const auto walk = [file, train](const SplitChunk& f) {
    int64_t at = 0;
    for_each_document(file, [&](const std::string& text) { f(text, at++ >= train); });
  };
  return {file.string(), walk, true};
}

Input split_text(const std::string& source) {
  if (holds_examples(source)) return documents_in(source);
  if (is_llmc_file(source)) bad_input("{}: contains llm.c tokens; `train` reads several such files directly", source);
  std::optional<Text> text = builtin_text(source);
  if (!text) check_table(source);
  return split_text(text ? *text : load_text_file(source));
}

// Reports progress at every MiB.
TextWalk with_progress(const Input& input, const std::string& what_for, const TokenizerChoice& choice) {
  if (!choice.progress) return input.walk;
  return [=, walk = input.walk, name = input.name, tell = choice.progress](const SplitChunk& f) {
    constexpr size_t kMebi = size_t{1} << 20;
    size_t bytes = 0;
    walk([&](std::string_view chunk, bool held) {
      const size_t before = std::exchange(bytes, bytes + chunk.size());
      if (before / kMebi != bytes / kMebi) tell(fmt::format("{}: {} MiB read for {}", name, bytes / kMebi, what_for));
      f(chunk, held);
    });
  };
}

void write_input(const Input& input, const Tokenizer& tokenizer, const TokenizerChoice& choice, DatasetWriter& writer) {
  const TextWalk walk = with_progress(input, "its tokens", choice);
  const auto write = [&](bool held) { return [&, held](std::span<const int32_t> more) { writer.add(more, held); }; };
  if (!input.documents) {
    const auto encoder = [&](bool held) {
      return TextEncoder(tokenizer, input.name, write(held), false, size_t{8} << 20, choice.special);
    };
    TextEncoder train = encoder(false), val = encoder(true);
    walk([&](std::string_view chunk, bool held) {
      (held ? val : train).add(chunk);
      writer.add_bytes(std::ssize(chunk), held);
    });
    train.finish(), val.finish();
    return writer.add_names(train.special_names()), writer.add_names(val.special_names());
  }
  const std::optional<int32_t> end = tokenizer.document_end();
  std::map<std::string, int64_t> names;
  walk([&](std::string_view one, bool held) {
    const std::string text = std::string(one) + (end ? "" : "\n\n");
    tokenizer.count_special(text, names);
    writer.add(tokenizer.beginning(), held);
    writer.add(tokenizer.encode_with(text, {.special_in_text = choice.special}), held);
    if (end) writer.add(std::span(&*end, 1), held);
    writer.add_bytes(std::ssize(one), held);
  });
  writer.add_names(names);
}

std::shared_ptr<const Tokenizer> tokenizer_for(std::span<const Input> all, const TokenizerChoice& choice,
                                               const std::string& what) {
  return make_tokenizer(choice, what, [&](const SplitChunk& f) {
    for (const Input& p : all)
      with_progress(p, "a tokenizer", choice)([&](std::string_view text, bool held) {
        f(text, held);
        if (p.documents) f("\n\n", held);
      });
  });
}

void require_new(const fs::path& directory) {
  std::error_code error;
  if (fs::exists(directory, error))
    throw OutputError(fmt::format("the dataset {} already exists; choose another name", directory.string()));
  if (error) throw OutputError(fmt::format("cannot create the dataset {}: {}", directory.string(), error.message()));
}

bool write_dataset(std::span<const Input> all, const std::string& what, const TokenizerChoice& choice,
                   const fs::path& directory, int64_t shard_tokens = 0) {
  const std::shared_ptr<const Tokenizer> tokenizer = tokenizer_for(all, choice, what);
  DatasetWriter writer(directory, what, tokenizer, shard_tokens);
  for (const Input& p : all) write_input(p, *tokenizer, choice, writer);
  return writer.finish(choice.special);
}
bool write_dataset(const Input& input, const TokenizerChoice& choice, const fs::path& directory) {
  return write_dataset(std::span(&input, 1), input.name, choice, directory);
}
bool write_dataset_of_llmc(const fs::path& file, const TokenizerChoice& choice, const fs::path& directory) {
  const std::shared_ptr<const Tokenizer> tokenizer = make_tokenizer(choice, file.string());
  DatasetWriter writer(directory, file.string(), tokenizer);
  write_llmc(file, *tokenizer, writer);
  return writer.finish(false);
}

Dataset opened(bool written, const fs::path& directory) {
  if (!written)
    throw OutputError(fmt::format("the dataset {} was created by another process in the meantime", directory.string()));
  return Dataset::open(directory);
}

std::string cache_key(const Text& text, const HeldOut& held, const TokenizerChoice& choice) {
  const uint64_t cuts = XXH3_64bits(text.documents.data(), text.documents.size() * sizeof(Span));
  const std::string rest = !held.file.empty()                    ? fmt::format("-{:016x}", file_checksum(held.file))
                           : held.fraction != HeldOut{}.fraction ? fmt::format("-{:g}", held.fraction)
                                                                 : "";
  return fmt::format("{}{:016x}-{}{}", text.content, cuts, cache_name(choice), rest);
}
std::string cache_key(const fs::path& file, const TokenizerChoice& choice) {
  const std::optional<fs::path> val = validation_path(file);
  return fmt::format("{:016x}{:016x}-{}", file_checksum(file), val ? file_checksum(*val) : 0, cache_name(choice));
}

Dataset open_fitting(const fs::path& directory, const TokenizerChoice& choice) {
  Dataset dataset = Dataset::open(directory);
  if (!fits(choice, *dataset.tokenizer))
    throw Error(fmt::format("`tokenizer` {}: the dataset {} was made with a different one ({})", choice.name,
                            directory.string(), dataset.tokenizer->kind()));
  const auto end = dataset.tokenizer->document_end();
  dataset.tokenizer = with_tokens(Tokenizer::load(directory / "tokenizer.json"), choice);
  if (!choice.end.empty() && dataset.tokenizer->document_end() != end)
    throw Error(fmt::format("`end`: the texts in the dataset {} end with a different token, or with none; expected {}",
                            directory.string(), end ? dataset.tokenizer->decode(std::span(&*end, 1)) : "no `end`"));
  return dataset;
}

// Calls `make` if the dataset is missing or corrupt. A directory's tokenizer is reloaded, because tokenizers that
// encode identically may differ in template or settings.
template <class Make>
Dataset cached(const std::string& key, const std::string& source, const TokenizerChoice& choice, const Make& make) {
  const fs::path directory = cache_directory() / "datasets" / key;
  remove_stale(cache_directory(), false);
  remove_stale(directory.parent_path(), false);
  std::error_code error;
  if (is_there(directory)) {
    try {
      Dataset found = Dataset::open(directory);
      found.source = source;  // the same content may be cached under another name
      if (!choice.learns()) found.tokenizer = make_tokenizer(choice, source);
      return found;
    } catch (const InputError&) {
      fs::remove_all(directory, error);
    }
  }
  make(directory);
  Dataset made = Dataset::open(directory);
  made.source = source;
  return made;
}

}  // namespace

Dataset make_dataset(const Text& text, const TokenizerChoice& choice, const fs::path& directory) {
  require_new(directory);
  return opened(write_dataset(split_text(text), choice, directory), directory);
}

Dataset make_dataset_from(const std::vector<std::string>& sources, const TokenizerChoice& choice,
                          const fs::path& directory, int64_t shard_tokens) {
  require_new(directory);
  std::vector<Input> all;
  for (const std::string& source : sources) all.push_back(split_text(source));
  const std::string what = fmt::format("{}", fmt::join(sources, ", "));
  return opened(write_dataset(all, what, choice, directory, shard_tokens), directory);
}

Dataset dataset_of_documents(const fs::path& file, const TokenizerChoice& choice) {
  return cached(cache_key(file, choice) + "-documents-and-bytes", file.string(), choice,
                [&](const fs::path& to) { write_dataset(documents_in(file), choice, to); });
}

Dataset import_llmc(const fs::path& file, const TokenizerChoice& choice, const fs::path& directory) {
  require_new(directory);
  require_folder(file.string(), choice);
  return opened(write_dataset_of_llmc(file, choice, directory), directory);
}

Dataset dataset_for(const std::string& spec, const TokenizerChoice& choice, const HeldOut& held) {
  std::optional<Text> text = builtin_text(spec);
  if (!text && (names_shards(spec) || names_directory(spec) || is_llmc_file(spec))) held.refuse(spec);
  if (!held.file.empty() && holds_examples(held.file))
    throw Error(fmt::format("`val_data`: expected text, like `data` {}; {} contains examples", spec, held.file));
  if (!text && choice.special && (names_shards(spec) || names_directory(spec) || is_llmc_file(spec)))
    throw Error(fmt::format("`special`: expected text or examples, got tokens, {}", spec));
  if (!text && names_shards(spec)) return open_shards(spec, choice);
  if (!text && names_directory(spec)) return open_fitting(spec, choice);
  if (!text && !is_there(spec))
    bad_input("`data` '{}': no such file or directory, and no built-in text (austen, tinyshakespeare)", spec);
  if (!text && is_llmc_file(spec)) {
    require_folder(spec, choice);
    return cached(cache_key(fs::path(spec), choice), spec, choice,
                  [&](const fs::path& to) { write_dataset_of_llmc(spec, choice, to); });
  }
  const std::string note = text ? "" : check_table(spec);
  if (!text) text = load_text_file(spec);
  Dataset out = cached(cache_key(*text, held, choice), text->name, choice,
                       [&](const fs::path& to) { write_dataset(split_text(*text, held), choice, to); });
  if (!note.empty()) out.notes.push_back(note);
  return out;
}

}  // namespace tessera
