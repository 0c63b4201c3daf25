// Which tokenizer a text gets: what `--tokenizer` can say.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "data/tokenizer.h"

namespace tessera {

struct TokenizerChoice {
  std::string name = {};  // char, bytes, bpe, or a tokenizer's folder (Tokenizer::open_folder); empty: `otherwise`
  std::string otherwise = "char";
  int64_t vocab_size = 50257;  // of a bpe tokenizer that is trained
  // Called while one is trained, with the tokens made so far.
  std::function<void(int64_t made, int64_t most)> progress = nullptr;

  std::string_view chosen() const { return name.empty() ? otherwise : name; }
};

// The tokenizer for a text named `what`, whose part to train on is `train`: char takes the characters of the whole
// text, bpe learns from `train`, a folder is read. Throws Error (usage) for a name that is none of these, InputError.
std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerChoice& choice, std::string_view text, std::string_view train,
                                          const std::string& what);

// What tells this choice from others in the cache's names: "char", "bytes", "bpe50257", or a hash of the folder's
// files. Throws as make_tokenizer() does.
std::string cache_name(const TokenizerChoice& choice);

// Throws Error (usage) where the choice is no folder, for a file of tokens that does not hold its tokenizer.
void require_folder(const std::string& file, const TokenizerChoice& choice);

// Whether a tokenizer is what the choice names; an empty name takes any. `bpe` takes every bpe tokenizer.
bool fits(const TokenizerChoice& choice, const Tokenizer& tokenizer);

}  // namespace tessera
