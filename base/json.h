// Parsing of untrusted JSON. Input that a lenient parser would silently change is rejected.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

// Files of Tessera are checked strictly in full. In other programs' files only the keys that are read are checked.
enum class JsonFile { ours, others };

// Parses one JSON value. `what` names the source in errors. Throws InputError for a syntax error (with its byte
// offset), duplicate keys, integers beyond 64 bits, numbers beyond double, nesting deeper than 64, and more values than
// fit in memory. In other programs' files, duplicate keys, such numbers and nesting, and Python's NaN and Infinity,
// instead produce a discarded value (is_discarded()), which every reader rejects. `aside` extracts the members of one
// large object.
struct JsonAside;
nlohmann::json parse_json(std::string_view text, const std::string& what, JsonFile manner = JsonFile::ours,
                          JsonAside* aside = nullptr);

// Throws InputError naming `what` if the tree of a text may not fit in the available memory.
void require_memory_for_json(std::string_view text, const std::string& what);

// Extracts the object root[outer][inner]: the tree contains an empty object in its place, and its members are stored
// here in the order of the text, because a tree of more than 100,000 members is slow. Duplicate keys are stored twice.
struct JsonAside {
  std::string_view outer, inner;
  std::vector<std::pair<std::string, nlohmann::json>> members;
};

// The value of a key, or null if it is missing.
const nlohmann::json& value_at(const nlohmann::json& json, std::string_view key);

// A value for messages: ASCII, truncated after `max_bytes`; a discarded value by its possible causes.
std::string shown(const nlohmann::json& value, size_t max_bytes = 120);

// Whether a value is empty: null, false, or an empty array or object.
bool is_nothing(const nlohmann::json& value);

// An integer from 0 to 2^62; nullopt for any other value.
std::optional<int64_t> natural(const nlohmann::json& value);

}  // namespace tessera
