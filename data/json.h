// JSON from outside, in two manners: what a lenient reader would silently change is refused.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

// Files of our own are strict as a whole. Files of others are strict in the keys that are read: the rest is skipped,
// whatever it holds.
enum class JsonFile { ours, others };

// Parses one JSON value. `what` names the source in messages. Throws InputError on a syntax error (with its byte), a
// key given twice, an integer beyond 64 bits, a number beyond double, or nesting deeper than 64. In a file of others
// each of the last four, and NaN and Infinity as Python writes them, is a value of no kind instead, which
// is_discarded() and no reader takes.
nlohmann::json parse_json(std::string_view text, const std::string& what, JsonFile manner = JsonFile::ours);

// The value of a key; null where it is not there.
const nlohmann::json& value_at(const nlohmann::json& json, std::string_view key);

// A value as a message shows it: ASCII, cut short behind `most` bytes. One of no kind by what may have made it so.
std::string shown(const nlohmann::json& value, size_t most = 120);

// Whether a value says nothing: null, false, or an empty array or object.
bool is_nothing(const nlohmann::json& value);

// A whole number from 0 to 2^62; nothing for any other value.
std::optional<int64_t> natural(const nlohmann::json& value);

}  // namespace tessera
