// Datasets made of texts and token files: tokens on their way into a directory, and the cache of those made.
#include <fmt/ranges.h>
#include <xxhash.h>

#include <iterator>
#include <nlohmann/json.hpp>

#include "data/bad_input.h"
#include "data/dataset.h"
#include "data/jsonl.h"
#include "data/tokenizer/described.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

struct Tokens {
  std::vector<int32_t> train = {}, val = {};
  size_t train_bytes = 0, val_bytes = 0;  // bytes of the text that the tokens mean
};

// The absolute name of a directory to make, of which "name/" is "name"; then its parent is there.
fs::path with_parent(const fs::path& named) {
  fs::path directory = fs::absolute(named).lexically_normal();
  if (!directory.has_filename()) directory = directory.parent_path();
  make_directories(directory.parent_path());
  remove_stale(directory.parent_path(), false);
  return directory;
}

// Writes the files beside the directory and moves them there in the end. Everything throws OutputError.
class DatasetWriter {
 public:
  // With `shard_tokens` the tokens to train on are cut into files of so many, the last of up to twice as many, which
  // are written as soon as they are full; 0: one file.
  DatasetWriter(const fs::path& directory, std::string source, std::shared_ptr<const Tokenizer> tokenizer,
                int64_t shard_tokens = 0)
      : directory_(with_parent(directory)),
        source_(std::move(source)),
        tokenizer_(std::move(tokenizer)),
        shard_tokens_(static_cast<size_t>(shard_tokens)),
        beside_(directory_) {
    make_directories(made_);
  }

  void add(const Tokens& t) {
    train_.insert(train_.end(), t.train.begin(), t.train.end());
    val_.insert(val_.end(), t.val.begin(), t.val.end());
    train_bytes_ += t.train_bytes;
    val_bytes_ += t.val_bytes;
    while (shard_tokens_ > 0 && train_.size() >= 2 * shard_tokens_) write_shard(shard_tokens_);
  }

  // False when the name was taken meanwhile.
  bool finish() {
    write_shard(train_.size());
    const int64_t vocab = tokenizer_->vocab_size();
    TokenFile::write(made_ / "val.tok", val_, vocab);
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
                                        {"val", {{"tokens", val_.size()}, {"bytes", val_bytes_}}}};
    // A file name need not be UTF-8; JSON must be.
    write_file(made_ / "dataset.json",
               description.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    std::error_code error, unknown;
    fs::rename(made_, directory_, error);
    if (error && !fs::exists(directory_, unknown))
      throw OutputError(fmt::format("cannot make the dataset {}: {}", directory_.string(), error.message()));
    return !error;
  }

 private:
  void write_shard(size_t tokens) {
    const std::string name = shard_tokens_ > 0 ? fmt::format("train-{:05}.tok", train_files_.size()) : "train.tok";
    TokenFile::write(made_ / name, std::span(train_).first(tokens), tokenizer_->vocab_size());
    train_.erase(train_.begin(), train_.begin() + static_cast<std::ptrdiff_t>(tokens));
    train_tokens_ += tokens;
    train_files_.push_back(name);
  }

  fs::path directory_;
  std::string source_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  size_t shard_tokens_;
  TemporaryDirectory beside_;
  fs::path made_ = beside_.path() / "dataset";
  std::vector<int32_t> train_ = {}, val_ = {};  // that are not written
  size_t train_tokens_ = 0, train_bytes_ = 0, val_bytes_ = 0;
  std::vector<std::string> train_files_ = {};
};

// A text on its way to tokens, or documents.
struct Parts {
  std::string name;
  std::vector<std::string> train, val;
  bool documents = false;  // each has its end behind it
};

Parts parts_of(const Text& text, const HeldOut& held = {}) {
  if (!held.file.empty()) return {text.name, {text.bytes}, {load_text_file(held.file).bytes}};
  Split split = split_text(text, held);
  return {text.name, {std::move(split.train)}, {std::move(split.val)}};
}

// The file to validate on: "train" in the last part of the name replaced by "val".
std::optional<fs::path> validation_of(const fs::path& file) {
  std::string name = file.filename().string();
  const size_t at = name.rfind("train");
  if (at == std::string::npos) return std::nullopt;
  const fs::path val = file.parent_path() / name.replace(at, 5, "val");
  return is_llmc_file(val) ? std::optional(val) : std::nullopt;
}

Tokens tokens_of_llmc(const fs::path& file, const Tokenizer& tokenizer) {
  Tokens t;
  t.train = TokenFile::open_llmc(file, tokenizer.vocab_size()).all();
  if (const std::optional<fs::path> val = validation_of(file)) {
    t.val = TokenFile::open_llmc(*val, tokenizer.vocab_size()).all();
  } else {
    const auto cut = static_cast<std::ptrdiff_t>(t.train.size() * 9 / 10);
    t.val.assign(t.train.begin() + cut, t.train.end());
    t.train.resize(static_cast<size_t>(cut));
  }
  if (t.train.size() < 2 || t.val.size() < 2)
    bad_input("{}: {} tokens to train on and {} held out; expected at least 2 of each", file.string(), t.train.size(),
              t.val.size());
  t.train_bytes = tokenizer.decode(t.train).size();
  t.val_bytes = tokenizer.decode(t.val).size();
  return t;
}

Parts documents_in(const fs::path& file) {
  Parts out{.name = file.string(), .train = {}, .val = {}, .documents = true};
  for_each_line(file, [&](std::string_view line, int64_t number) {
    const std::string where = fmt::format("{}:{}", file.string(), number);
    const Example example = parse_example(line, where);
    if (example.shape != Example::Shape::text)
      throw InputError(where +
                       ": expected a document, {\"text\": ...}; conversations are what a run of `train` reads itself");
    out.train.push_back(example.turns.at(0).text);
  });
  if (out.train.size() < 2)
    bad_input("{}: {} documents; expected at least 2, one of them held out", file.string(), out.train.size());
  const auto held = out.train.end() - static_cast<std::ptrdiff_t>(std::max<size_t>(out.train.size() / 10, 1));
  out.val.assign(std::make_move_iterator(held), std::make_move_iterator(out.train.end()));
  out.train.erase(held, out.train.end());
  return out;
}

Parts parts_of(const std::string& source) {
  if (holds_examples(source)) return documents_in(source);
  if (is_llmc_file(source))
    bad_input("{}: holds tokens of llm.c; `train` reads several such files where they lie", source);
  std::optional<Text> text = known_text(source);
  return parts_of(text ? *text : load_text_file(source));
}

// Tokens and bytes of one split.
void encode(const std::vector<std::string>& texts, bool documents, const Tokenizer& tokenizer,
            std::vector<int32_t>& tokens, size_t& bytes) {
  std::optional<int32_t> end;
  std::span<const int32_t> before;  // each document
  if (documents) end = tokenizer.document_end(), before = tokenizer.beginning();
  for (const std::string& one : texts) {
    const std::string text = documents && !end ? one + "\n\n" : one;
    const std::vector<int32_t> own = tokenizer.encode(text);
    tokens.insert(tokens.end(), before.begin(), before.end());
    tokens.insert(tokens.end(), own.begin(), own.end());
    if (end) tokens.push_back(*end);
    bytes += text.size();
  }
}

Tokens encode(const Parts& parts, const Tokenizer& tokenizer) {
  Tokens t;
  encode(parts.train, parts.documents, tokenizer, t.train, t.train_bytes);
  encode(parts.val, parts.documents, tokenizer, t.val, t.val_bytes);
  return t;
}

// One that is learnt learns from all of them.
std::shared_ptr<const Tokenizer> tokenizer_for(std::span<const Parts> all, const TokenizerChoice& choice,
                                               const std::string& what) {
  if (!choice.learns()) return make_tokenizer(choice, "", "", what);
  std::string text;
  const auto add = [&](const std::vector<std::string>& texts, bool documents) {
    for (const std::string& one : texts) text.append(one).append(documents ? "\n\n" : "");
  };
  for (const Parts& p : all) add(p.train, p.documents);
  const size_t train = text.size();
  for (const Parts& p : all) add(p.val, p.documents);
  return make_tokenizer(choice, text, std::string_view(text).substr(0, train), what);
}

void require_new(const fs::path& directory) {
  std::error_code error;
  if (fs::exists(directory, error))
    throw OutputError(fmt::format("the dataset {} exists already; give another name", directory.string()));
  if (error) throw OutputError(fmt::format("cannot make the dataset {}: {}", directory.string(), error.message()));
}

// A dataset of one source, to be written.
struct Made {
  std::string source;
  std::shared_ptr<const Tokenizer> tokenizer;
  Tokens tokens;

  // False when the name was taken meanwhile.
  bool write(const fs::path& directory) const {
    DatasetWriter writer(directory, source, tokenizer);
    writer.add(tokens);
    return writer.finish();
  }
};

Made made_of(const Parts& parts, const TokenizerChoice& choice) {
  const auto tokenizer = tokenizer_for(std::span(&parts, 1), choice, parts.name);
  return {parts.name, tokenizer, encode(parts, *tokenizer)};
}

Made made_of_llmc(const fs::path& file, const TokenizerChoice& choice) {
  const std::shared_ptr<const Tokenizer> tokenizer = make_tokenizer(choice, "", "", file.string());
  return {file.string(), tokenizer, tokens_of_llmc(file, *tokenizer)};
}

Dataset opened(bool written, const fs::path& directory) {
  if (!written) throw OutputError(fmt::format("the dataset {} appeared while it was made", directory.string()));
  return Dataset::open(directory);
}

// Names in the cache: the content, where its documents end, and the tokenizer.
std::string cache_key(const Text& text, const HeldOut& held, const TokenizerChoice& choice) {
  const XXH128_hash_t content = XXH3_128bits(text.bytes.data(), text.bytes.size());
  const uint64_t cuts = XXH3_64bits(text.documents.data(), text.documents.size() * sizeof(Span));
  const std::string rest = !held.file.empty()              ? fmt::format("-{:016x}", checksum_of(held.file))
                           : held.share != HeldOut{}.share ? fmt::format("-{:g}", held.share)
                                                           : "";
  return fmt::format("{:016x}{:016x}{:016x}-{}{}", content.high64, content.low64, cuts, cache_name(choice), rest);
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
  const auto end = dataset.tokenizer->document_end();
  dataset.tokenizer = with_tokens(Tokenizer::load(directory / "tokenizer.json"), choice);
  if (!choice.end.empty() && dataset.tokenizer->document_end() != end)
    throw Error(fmt::format("`end`: the texts in the dataset {} have another end, or none; expected {}",
                            directory.string(), end ? dataset.tokenizer->decode(std::span(&*end, 1)) : "no `end`"));
  return dataset;
}

// The dataset of that name in the cache, made by `make` when it is not there or damaged. A folder's tokenizer is the
// one that is there now: others that make the same of every text may come with another template or other settings.
template <class Make>
Dataset cached(const std::string& key, const std::string& source, const TokenizerChoice& choice, const Make& make) {
  const fs::path directory = cache_directory() / "datasets" / key;
  remove_stale(cache_directory(), false);
  remove_stale(directory.parent_path(), false);
  std::error_code error;
  if (is_there(directory)) {
    try {
      Dataset found = Dataset::open(directory);
      found.source = source;  // the same content may have been met under another name
      if (!choice.learns()) found.tokenizer = make_tokenizer(choice, "", "", source);
      return found;
    } catch (const InputError&) {
      fs::remove_all(directory, error);
    }
  }
  make().write(directory);
  Dataset made = Dataset::open(directory);
  made.source = source;
  return made;
}

}  // namespace

Dataset make_dataset(const Text& text, const TokenizerChoice& choice, const fs::path& directory) {
  require_new(directory);
  return opened(made_of(parts_of(text), choice).write(directory), directory);
}

Dataset make_dataset_of(const std::vector<std::string>& sources, const TokenizerChoice& choice,
                        const fs::path& directory, int64_t shard_tokens) {
  require_new(directory);
  std::vector<Parts> all;
  if (choice.learns())
    for (const std::string& source : sources) all.push_back(parts_of(source));
  const std::string what = fmt::format("{}", fmt::join(sources, ", "));
  const std::shared_ptr<const Tokenizer> tokenizer = tokenizer_for(all, choice, what);
  DatasetWriter writer(directory, what, tokenizer, shard_tokens);
  for (size_t i = 0; i < sources.size(); ++i)
    writer.add(encode(all.empty() ? parts_of(sources[i]) : all[i], *tokenizer));
  return opened(writer.finish(), directory);
}

Dataset dataset_of_documents(const fs::path& file, const TokenizerChoice& choice) {
  return cached(cache_key(file, choice) + "-documents-with-ends", file.string(), choice,
                [&] { return made_of(documents_in(file), choice); });
}

Dataset import_llmc(const fs::path& file, const TokenizerChoice& choice, const fs::path& directory) {
  require_new(directory);
  require_folder(file.string(), choice);
  return opened(made_of_llmc(file, choice).write(directory), directory);
}

Dataset dataset_for(const std::string& spec, const TokenizerChoice& choice, const HeldOut& held) {
  std::optional<Text> text = known_text(spec);
  if (!text && (names_shards(spec) || is_folder(spec) || is_llmc_file(spec))) held.refuse(spec);
  if (!held.file.empty() && holds_examples(held.file))
    throw Error(fmt::format("`val_data`: expected a text, as `data` {} is one; {} holds examples", spec, held.file));
  if (!text && names_shards(spec)) return open_shards(spec, choice);
  if (!text && is_folder(spec)) return open_fitting(spec, choice);
  if (!text && !is_there(spec))
    bad_input("`data` '{}': no such file or directory, and no known text (those are austen and tinyshakespeare)", spec);
  if (!text && is_llmc_file(spec)) {
    require_folder(spec, choice);
    return cached(cache_key(fs::path(spec), choice), spec, choice, [&] { return made_of_llmc(spec, choice); });
  }
  if (!text) text = load_text_file(spec);
  return cached(cache_key(*text, held, choice), text->name, choice,
                [&] { return made_of(parts_of(*text, held), choice); });
}

}  // namespace tessera
