// Configuration files in a subset of TOML: one KEY = VALUE per line.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct ConfigEntry {
  std::string where;                // PATH:LINE:COLUMN of the key
  std::string key;                  // letters, digits, - and _
  std::string value;                // source text
  std::optional<std::string> text;  // decoded value of a string
};

// `path` names the file in errors. A value is a "string" with JSON escapes, a 'string' without escapes, a JSON number,
// true or false; # begins a comment. Throws Error (usage) with line and column for any other syntax, duplicate keys,
// invalid UTF-8, and files over 4 MiB.
std::vector<ConfigEntry> read_config(std::string_view file, const std::string& path);

}  // namespace tessera
