// JSON from outside, strictly: what a lenient reader would silently change is refused.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

// Parses one JSON value. `what` names the source in messages. Throws InputError on a syntax error (with its byte), a
// key given twice, an integer beyond 64 bits, a number beyond double, or nesting deeper than 64.
nlohmann::json parse_json(std::string_view text, const std::string& what);

// A whole number from 0 to 2^62; nothing for any other value.
std::optional<int64_t> natural(const nlohmann::json& value);

}  // namespace tessera
