// The keys of a JSON object that another program wrote. Each is asked for by its name. One that would change what is
// computed is refused by its name where its value does so; all others may hold anything, and are named in a note.
#pragma once
#include <cfloat>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Keys, as words, that change what is computed, but for these values (none: null, false and empty ones).
struct HeldKeys {
  std::string_view keys;
  std::vector<nlohmann::json> values = {};
  std::string_view because = {};  // behind what was expected
  std::string_view of = {};       // words: the only objects where it is so; empty: everywhere
};

class HubKeys {
 public:
  // `what` names the file in messages. Everything throws InputError.
  HubKeys(std::string_view text, std::string what);
  HubKeys(nlohmann::json json, std::string what);

  [[noreturn]] void refuse(std::string_view key, std::string_view expected, const nlohmann::json& found) const;
  bool has(std::string_view key) const { return json_.contains(key); }
  // null counts as a key that is not there.
  const nlohmann::json* find(std::string_view key);

  // A whole number of at least one, a number, true or false, a text. A key must be there if nothing is usual.
  int64_t size(std::string_view key, std::optional<int64_t> usual = {}, int64_t most = int64_t{1} << 40);
  double number(std::string_view key, std::optional<double> usual = {}, double least = DBL_MIN, double most = 1e12);
  bool flag(std::string_view key, bool usual);
  std::string text(std::string_view key, const std::string& usual);

  // Refuses what the table forbids in an object that is called `of`.
  void hold(std::span<const HeldKeys> table, std::string_view of = {});
  // One line about keys that nobody asked for and that are not among these words; empty where there are none.
  std::string unread(std::string_view quiet) const;

 private:
  // A value that fits; null where it may be missing and is.
  template <class Fits>
  const nlohmann::json* given(std::string_view key, std::string_view expected, bool may_miss, const Fits& fits) {
    const nlohmann::json* const found = find(key);
    if (found ? !fits(*found) : !may_miss) refuse(key, expected, found ? *found : nlohmann::json());
    return found;
  }

  nlohmann::json json_;
  std::string what_;
  std::set<std::string, std::less<>> known_;
};

}  // namespace tessera
