// What the options say of the tokenizer, for the data layer, with progress shown while one is trained.
#pragma once
#include <optional>
#include <string>

#include "data/tokenizer_choice.h"

namespace tessera {

// bpe-N is a bpe tokenizer of at most N tokens. Throws Error (usage) when --tokenizer names neither a kind of tokenizer
// nor a folder.
TokenizerChoice tokenizer_choice(const std::optional<std::string>& name, const std::string& otherwise, bool quiet);

}  // namespace tessera
