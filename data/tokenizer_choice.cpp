// Making the tokenizer that was chosen.
#include "data/tokenizer_choice.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <filesystem>

#include "data/bpe/bpe_train.h"
#include "tensor/error.h"

namespace tessera {
namespace {

// Rare pairs are not worth a token: its embedding would hardly be trained.
constexpr int64_t kLeastCount = 16;

bool is_builtin(std::string_view name) { return name == "char" || name == "bytes" || name == "bpe"; }

std::unique_ptr<Tokenizer> load_folder(std::string_view name) {
  std::error_code error;
  if (!std::filesystem::is_directory(name, error))
    throw Error(fmt::format("`tokenizer` '{}': expected char, bytes, bpe, or a tokenizer's folder", name));
  return Tokenizer::open_folder(name);
}

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerChoice& choice, std::string_view text, std::string_view train,
                                          const std::string& what) {
  const std::string_view name = choice.chosen();
  if (name == "char") return std::make_unique<CharTokenizer>(CharTokenizer::of_text(text, what));
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
  if (name != "bpe") return load_folder(name);
  BpeTraining training{.vocab_size = choice.vocab_size, .least_count = kLeastCount};
  if (choice.progress) training.progress = [&](int64_t made) { choice.progress(made, choice.vocab_size); };
  return std::make_unique<BpeTokenizer>(train_bpe(train, training));
}

std::string cache_name(const TokenizerChoice& choice) {
  const std::string_view name = choice.chosen();
  if (name == "bpe") return fmt::format("bpe{}", choice.vocab_size);
  if (is_builtin(name)) return std::string(name);
  const std::string json = load_folder(name)->to_json();
  return fmt::format("{:016x}", XXH3_64bits(json.data(), json.size()));
}

void require_folder(const std::string& file, const TokenizerChoice& choice) {
  if (choice.name.empty() || is_builtin(choice.name))
    throw Error(fmt::format(
        "`tokenizer`: expected the folder with the tokenizer.json, or the vocab.json and merges.txt, that {} was made "
        "with, found {}",
        file, choice.name.empty() ? "none" : "'" + choice.name + "'"));
}

bool fits(const TokenizerChoice& choice, const Tokenizer& tokenizer) {
  if (choice.name.empty()) return true;
  if (is_builtin(choice.name)) return choice.name == tokenizer.kind();
  return load_folder(choice.name)->to_json() == tokenizer.to_json();
}

}  // namespace tessera
