// Strict parsing of untrusted JSON: rejects input that a lenient parser would silently change.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

// Tessera's files are checked in full, other programs' files only at the keys that are read.
enum class JsonFile { ours, others };

// `what` names the source in errors. Throws InputError for a syntax error (with its byte offset), duplicate keys,
// integers beyond 64 bits, numbers beyond double, nesting deeper than 64, and more values than fit in memory. In other
// programs' files, duplicate keys, such numbers and nesting, and Python's NaN and Infinity instead produce a discarded
// value (is_discarded()), which every reader rejects. `aside` extracts the members of one large object.
struct JsonAside;
nlohmann::json parse_json(std::string_view text, const std::string& what, JsonFile manner = JsonFile::ours,
                          JsonAside* aside = nullptr);

// Throws InputError naming `what` if the text's tree may not fit in the available memory.
void require_memory_for_json(std::string_view text, const std::string& what);

// Receives the members of root[outer][inner] in the order of the text, because a tree of more than 100,000 members is
// slow; the tree contains an empty object instead. Duplicate keys are stored twice.
struct JsonAside {
  std::string_view outer, inner;
  std::vector<std::pair<std::string, nlohmann::json>> members;
};

// Null if the key is missing.
const nlohmann::json& value_at(const nlohmann::json& json, std::string_view key);

// For messages: ASCII, truncated after `max_bytes`; a discarded value is described by its possible causes.
std::string shown(const nlohmann::json& value, size_t max_bytes = 120);

// Null, false, or an empty array or object.
bool is_nothing(const nlohmann::json& value);

// An integer from 0 to 2^62; nullopt for any other value.
std::optional<int64_t> natural(const nlohmann::json& value);

}  // namespace tessera
