// JSON from outside, in two manners: what a lenient reader would silently change is refused.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

// Files of our own are strict as a whole. Files of others are strict in the keys that are read: the rest is skipped,
// whatever it holds.
enum class JsonFile { ours, others };

// Parses one JSON value. `what` names the source in messages. Throws InputError on a syntax error (with its byte), a
// key given twice, an integer beyond 64 bits, a number beyond double, nesting deeper than 64, or more values than the
// memory allows. In a file of others each of the last four, and NaN and Infinity as Python writes them, is a value of
// no kind instead, which is_discarded() and no reader takes. `aside`, where it is given, takes the members of one large
// object.
struct JsonAside;
nlohmann::json parse_json(std::string_view text, const std::string& what, JsonFile manner = JsonFile::ours,
                          JsonAside* aside = nullptr);

// Throws InputError, which names `what`, if the tree of a text may not fit in the memory that is left.
void require_memory_for_json(std::string_view text, const std::string& what);

// The object of the member `inner` of the root's object `outer`: the tree has an empty one in its place, and its
// members stand here in the order of the text, since a tree of 100,000 and more is slow. A key given twice stands here
// twice.
struct JsonAside {
  std::string_view outer, inner;
  std::vector<std::pair<std::string, nlohmann::json>> members;
};

// The value of a key; null where it is not there.
const nlohmann::json& value_at(const nlohmann::json& json, std::string_view key);

// A value as a message shows it: ASCII, cut short behind `most` bytes. One of no kind by what may have made it so.
std::string shown(const nlohmann::json& value, size_t most = 120);

// Whether a value says nothing: null, false, or an empty array or object.
bool is_nothing(const nlohmann::json& value);

// A whole number from 0 to 2^62; nothing for any other value.
std::optional<int64_t> natural(const nlohmann::json& value);

}  // namespace tessera
