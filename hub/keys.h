// Keys of a JSON object written by another program. A value that would change the computation is rejected; keys that
// are never requested may have any value and are listed in a note.
#pragma once
#include <cfloat>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Space-separated keys that change the computation unless they have one of these values (none: null, false or empty).
struct RestrictedKeys {
  std::string_view keys;
  std::vector<nlohmann::json> values = {};
  std::string_view because = {};  // appended to the expected value in errors
  std::string_view of = {};       // space-separated names of the objects that the keys belong to; empty: all
};

class HubKeys {
 public:
  // `what` names the file in errors. Every function throws InputError.
  HubKeys(std::string_view text, std::string what);
  HubKeys(nlohmann::json json, std::string what);

  [[noreturn]] void refuse(std::string_view key, std::string_view expected, const nlohmann::json& found) const;
  bool has(std::string_view key) const { return json_.contains(key); }
  // Null counts as missing.
  const nlohmann::json* find(std::string_view key);

  // Without a default the key is required.
  int64_t size(std::string_view key, std::optional<int64_t> default_value = {}, int64_t max = int64_t{1} << 40);
  double number(std::string_view key, std::optional<double> default_value = {}, double min = DBL_MIN,
                double max = 1e12);
  bool flag(std::string_view key, bool default_value);
  std::string text(std::string_view key, const std::string& default_value);

  // Rejects restricted values in an object named `of`.
  void check(std::span<const RestrictedKeys> table, std::string_view of = {});
  // Lists keys that were never requested and are not in `quiet` (space-separated).
  std::string unread(std::string_view quiet) const;

 private:
  // Null if the key is optional and missing.
  template <class Fits>
  const nlohmann::json* fetch(std::string_view key, std::string_view expected, bool may_miss, const Fits& fits) {
    const nlohmann::json* const found = find(key);
    if (found ? !fits(*found) : !may_miss) refuse(key, expected, found ? *found : nlohmann::json());
    return found;
  }

  nlohmann::json json_;
  std::string what_;
  std::set<std::string, std::less<>> known_;
};

}  // namespace tessera
