// What the readers of the parts of a tokenizer.json share.
#pragma once
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tensor/error.h"

namespace tessera::hub {

using Json = nlohmann::json;

// The value of a key; null where it is not there.
inline const Json& at(const Json& json, const char* key) {
  static const Json null;
  const auto found = json.is_object() ? json.find(key) : json.end();
  return found == json.end() ? null : *found;
}

// A value as a message shows it.
inline std::string shown(const Json& value) {
  const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return text.size() <= 120 ? text : text.substr(0, 120) + "...";
}

inline bool flag(const Json& json, const char* key, bool otherwise, const std::string& what) {
  const Json& value = at(json, key);
  if (value.is_null()) return otherwise;
  if (!value.is_boolean())
    throw InputError(fmt::format("{}: '{}' must be true or false, not {}", what, key, shown(value)));
  return value.get<bool>();
}

}  // namespace tessera::hub
