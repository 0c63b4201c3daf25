// Strict parsing of untrusted JSON: rejects what a lenient parser would silently change.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

// Tessera's files are checked in full, other programs' only at the keys that are read.
enum class JsonFile { ours, others };

// Throws InputError for a syntax error (with its byte offset), duplicate keys, integers beyond 64 bits, numbers outside
// double's range, nesting deeper than 64, and more values than fit in memory. In other programs' files, duplicate keys,
// such numbers or nesting, and Python's NaN and Infinity instead produce a discarded value (is_discarded()), which
// every reader rejects. `aside` extracts the members of one large object.
struct JsonAside;
nlohmann::json parse_json(std::string_view text, const std::string& what, JsonFile manner = JsonFile::ours,
                          JsonAside* aside = nullptr);

// Throws InputError if the text's tree may not fit in the available memory.
void require_memory_for_json(std::string_view text, const std::string& what);

// Receives the members of root[outer][inner] in order, leaving an empty object in the tree, because a tree of more than
// 100,000 members is slow. Duplicate keys are stored twice.
struct JsonAside {
  std::string_view outer, inner;
  std::vector<std::pair<std::string, nlohmann::json>> members;
};

// Null if the key is missing.
const nlohmann::json& value_at(const nlohmann::json& json, std::string_view key);

// ASCII text, truncated after `max_bytes`; for a discarded value, the possible reasons.
std::string shown(const nlohmann::json& value, size_t max_bytes = 120);

// Null, false, or an empty array or object.
bool is_nothing(const nlohmann::json& value);

// An integer from 0 to 2^62; nullopt for any other value.
std::optional<int64_t> natural(const nlohmann::json& value);

}  // namespace tessera
