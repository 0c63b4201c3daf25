// Sizes of models by name. Published ones are as their makers' papers and files say; a vocabulary of 0 is the
// tokenizer's.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "models/language_model.h"

namespace tessera {

std::optional<ModelConfig> preset(std::string_view name);
// "gpt-nano|gpt-mini|...", in the order of the table.
const std::string& preset_names();

}  // namespace tessera
