// Access to values by key.
#include "hub/keys.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>

#include "base/bad_input.h"
#include "base/json.h"
#include "base/setting.h"

namespace tessera {

using nlohmann::json;

HubKeys::HubKeys(std::string_view text, std::string what)
    : HubKeys(parse_json(text, what, JsonFile::others), std::move(what)) {}

HubKeys::HubKeys(json object, std::string what) : json_(std::move(object)), what_(std::move(what)) {
  if (!json_.is_object()) throw InputError(what_ + ": expected an object");
}

void HubKeys::refuse(std::string_view key, std::string_view expected, const json& found) const {
  bad_input("{}: the key '{}': expected {}, got {}", what_, key, expected, shown(found, 60));
}

const json* HubKeys::find(std::string_view key) {
  const auto found = json_.find(*known_.emplace(key).first);
  return found == json_.end() || found->is_null() ? nullptr : &*found;
}

int64_t HubKeys::size(std::string_view key, std::optional<int64_t> default_value, int64_t max) {
  const json* const found = fetch(key, "a size", default_value.has_value(), [](const json& value) {
    const std::optional<int64_t> size = natural(value);
    return size && *size >= 1 && *size <= int64_t{1} << 40;
  });
  if (found && found->get<int64_t>() > max) refuse(key, fmt::format("at most {}", max), *found);
  return found ? found->get<int64_t>() : *default_value;
}

double HubKeys::number(std::string_view key, std::optional<double> default_value, double min, double max) {
  const std::string expected = min == DBL_MIN ? "a number above 0" : fmt::format("a number in [{}, {}]", min, max);
  const json* const found = fetch(key, expected, default_value.has_value(), [&](const json& value) {
    return value.is_number() && value.get<double>() >= min && value.get<double>() <= max;
  });
  return found ? found->get<double>() : *default_value;
}

bool HubKeys::flag(std::string_view key, bool default_value) {
  const json* const found = fetch(key, "true or false", true, [](const json& value) { return value.is_boolean(); });
  return found ? found->get<bool>() : default_value;
}

std::string HubKeys::text(std::string_view key, const std::string& default_value) {
  const json* const found = fetch(key, "a string", true, [](const json& value) { return value.is_string(); });
  return found ? found->get<std::string>() : default_value;
}

void HubKeys::check(std::span<const RestrictedKeys> table, std::string_view of) {
  for (const RestrictedKeys& rule : table) {
    if (!rule.of.empty() && std::ranges::count(split(rule.of, ' '), of) == 0) continue;
    for (const std::string& key : split(rule.keys, ' ')) {
      const json* const found = find(key);
      if (found && !(rule.values.empty() ? is_nothing(*found) : std::ranges::count(rule.values, *found) > 0))
        refuse(key, (rule.values.empty() ? "nothing" : rule.values[0].dump()) + std::string(rule.because), *found);
    }
  }
}

std::string HubKeys::unread(std::string_view quiet) const {
  constexpr size_t kMaxNamed = 12, kLongest = 60;
  const std::vector<std::string> others = split(quiet, ' ');
  std::vector<std::string> names;
  for (const auto& [key, value] : json_.items())
    if (!value.is_null() && !known_.contains(key) && std::ranges::count(others, key) == 0)
      names.push_back(key.substr(0, kLongest));
  if (names.empty()) return "";
  const size_t more = names.size() - std::min(names.size(), kMaxNamed);
  names.resize(names.size() - more);
  return fmt::format("{}: ignored keys without effect on the computation: {}{}", what_, fmt::join(names, ", "),
                     more > 0 ? fmt::format(" and {} more", more) : "");
}

}  // namespace tessera
