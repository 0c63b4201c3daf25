// Splits lines into keys and values; nlohmann's JSON parser decodes the values.
#include "base/config_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/utf8.h"

namespace tessera {
namespace {

constexpr size_t kMaxBytes = size_t{4} << 20;
constexpr const char* kBlank = " \t";
constexpr const char* kOfKeys = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_";
constexpr const char* kOfPlainValues = "0123456789+-.eEtrufals";  // characters of numbers, true and false

struct Line {
  std::string place;  // PATH:LINE
  std::string_view full, rest = full;

  std::string_view take(size_t length) {
    const std::string_view taken = rest.substr(0, length);
    rest.remove_prefix(taken.size());
    return taken;
  }
  std::string_view take_all(const char* characters) { return take(rest.find_first_not_of(characters)); }
  std::string_view take_value() {
    if (!rest.starts_with('"') && !rest.starts_with('\'')) return take_all(kOfPlainValues);
    size_t at = 1;
    while (at < rest.size() && rest[at] != rest[0]) at += rest[0] == '"' && rest[at] == '\\' ? 2 : 1;
    return take(at + 1);
  }
  // Skips blanks; returns the column.
  size_t at() {
    take_all(kBlank);
    return full.size() - rest.size();
  }
  bool ends() { return at() == full.size() || rest.front() == '#'; }
  std::string where(size_t at) const { return fmt::format("{}:{}", place, at + 1); }
  [[noreturn]] void refuse(size_t at, std::string_view why = "") const {
    const std::string found = at < full.size() ? fmt::format("'{}'", full.substr(at)) : "the end of the line";
    throw Error(fmt::format("{}: expected KEY = VALUE, got {}{}", where(at), found, why));
  }
};

bool is_control(unsigned char c) { return (c < 0x20 && c != '\t') || c == 0x7f; }

std::optional<ConfigEntry> read_line(Line line) {
  const auto control = std::ranges::find_if(line.full, is_control) - line.full.begin();
  const size_t bad = std::min(find_invalid_utf8(line.full), static_cast<size_t>(control));
  if (bad < line.full.size()) line.refuse(bad, "; control characters and invalid UTF-8 are not allowed");
  if (line.ends()) return std::nullopt;
  ConfigEntry entry{line.where(line.at()), std::string(line.take_all(kOfKeys)), {}, {}};
  const size_t equals = line.at();
  if (entry.key.empty() || line.take(1) != "=") line.refuse(equals);
  const size_t begin = line.at();
  const std::string_view value = line.take_value();
  const auto parsed = value.size() > 1 && value.front() == '\'' && value.back() == '\''
                          ? nlohmann::json(value.substr(1, value.size() - 2))
                          : nlohmann::json::parse(value, nullptr, false);
  if (parsed.is_discarded() || !line.ends()) line.refuse(begin, "; expected a single string, number, true or false");
  entry.value = value;
  if (parsed.is_string()) entry.text = parsed.get<std::string>();
  return entry;
}

}  // namespace

std::vector<ConfigEntry> read_config(std::string_view file, const std::string& path) {
  std::vector<ConfigEntry> entries;
  std::set<std::string> keys;
  if (file.size() > kMaxBytes)
    throw Error(fmt::format("{}: {} bytes; expected at most {}", path, file.size(), kMaxBytes));
  if (file.starts_with("\xEF\xBB\xBF")) file.remove_prefix(3);
  for (int64_t number = 1; !file.empty(); ++number) {
    std::string_view text = file.substr(0, file.find('\n'));
    file.remove_prefix(std::min(text.size() + 1, file.size()));
    if (text.ends_with('\r')) text.remove_suffix(1);
    std::optional<ConfigEntry> entry = read_line({fmt::format("{}:{}", path, number), text});
    if (!entry) continue;
    if (!keys.insert(entry->key).second) throw Error(fmt::format("{}: duplicate key {}", entry->where, entry->key));
    entries.push_back(*std::move(entry));
  }
  return entries;
}

}  // namespace tessera
