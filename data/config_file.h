// A configuration file: KEY = VALUE on every line, which is the part of TOML that it is written in.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct ConfigEntry {
  std::string where;                // PATH:LINE:COLUMN of its key, for messages
  std::string key;                  // letters, digits, - and _
  std::string value;                // as it is written
  std::optional<std::string> text;  // the contents of a string
};

// The entries of a file that `path` names. A value is a "string" with the escapes of JSON, a 'string' that has none, a
// number as JSON has it, true or false; comments begin with #. Throws Error (usage) with line and column for anything
// else, for a key that comes again, for bytes that are not UTF-8, and for more than 4 MiB.
std::vector<ConfigEntry> read_config(std::string_view file, const std::string& path);

}  // namespace tessera
