// A parsed tokenizer.json with its vocabulary extracted.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/json.h"

namespace tessera::hub {

inline constexpr const char *kTokenizer = "tokenizer.json", *kConfig = "tokenizer_config.json",
                            *kNames = "special_tokens_map.json", *kTemplate = "chat_template.jinja",
                            *kGeneration = "generation_config.json";

struct File {
  File(std::string_view text, const std::string& what) : json(parse_json(text, what, JsonFile::others, &vocab)) {}

  JsonAside vocab{"model", "vocab", {}};
  const nlohmann::json json;
};

}  // namespace tessera::hub
