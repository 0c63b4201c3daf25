// Conversion of fields from and to JSON.
#include "base/setting_json.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/error.h"
#include "base/json.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
using Ordered = nlohmann::ordered_json;

struct JsonReader {
  const Setting& setting;
  const Json& from;
  const std::string& name;

  [[noreturn]] void refuse(const std::string& expected, const std::string& meant = "") const {
    throw FieldError(name, fmt::format("expected {}, got {}{}", expected, from.dump(), meant));
  }
  void operator()(int64_t* to) const {
    if (!from.is_number_integer()) refuse("an integer");
    if (setting.field.range.min >= 0 && !natural(from)) refuse("a non-negative integer");
    *to = from.get<int64_t>();
  }
  void operator()(double* to) const {
    if (!from.is_number()) refuse("a number");
    *to = from.get<double>();
  }
  void operator()(bool* to) const {
    if (!from.is_boolean()) refuse("true or false");
    *to = from.get<bool>();
  }
  void operator()(std::string* to) const {
    if (!from.is_string()) refuse("a string");
    *to = from.get<std::string>();
  }
  template <class T>
  void operator()(std::vector<T>* to) const {
    if (!from.is_array()) refuse("a list");
    to->clear();
    for (const Json& one : from) JsonReader{setting, one, name}(&to->emplace_back());
  }
  void operator()(const Choice& c) const {
    const std::string given = c.is_number()      ? from.is_number_integer() ? from.dump() : ""
                              : from.is_string() ? from.get<std::string>()
                                                 : "";
    const auto found = std::ranges::find(c.names, setting.field.renames ? setting.field.renames(given) : given);
    if (found == c.names.end()) {
      if (!c.is_number()) refuse(fmt::format("{}", fmt::join(c.names, ", ")), did_you_mean(given, c.names));
      refuse(fmt::format("{} or {}", fmt::join(c.names.first(c.names.size() - 1), ", "), c.names.back()));
    }
    c.set(c.at, found - c.names.begin());
  }
  template <class T>
  void operator()(std::optional<T>* to) const {
    operator()(&to->emplace());
  }
};

struct JsonWriter {
  Ordered operator()(const Choice& c) const { return c.is_number() ? Ordered(c.get(c.at)) : Ordered(c.name()); }
  template <class T>
  Ordered operator()(const T* v) const {
    return *v;
  }
  template <class T>
  Ordered operator()(const std::optional<T>* v) const {
    return *v ? Ordered(**v) : Ordered();
  }
};

std::string below(const std::string& path, std::string_view key) {
  return path.empty() ? std::string(key) : fmt::format("{}.{}", path, key);
}

}  // namespace

Ordered to_json(const Setting& setting) {
  const double* fraction = setting.field.fraction;
  return fraction && *fraction > 0 ? Ordered(setting.text()) : std::visit(JsonWriter(), setting.at);
}

Ordered to_json(const Settings& all) {
  Ordered out = Ordered::object();
  for (const Setting& s : all)
    // empty() is false for "". NOLINTNEXTLINE(readability-container-size-empty)
    if (Ordered value = to_json(s); !value.is_null() && value != "") out[std::string(s.name)] = std::move(value);
  return out;
}

void take_value(const Setting& s, const Json& value, const std::string& name) {
  std::visit(JsonReader{s, value, name}, s.at);
}

void check_keys(const Json& object, const std::string& path, const std::vector<std::string>& known,
                const std::string& why) {
  for (const auto& [key, value] : object.items())
    if (std::ranges::find(known, key) == known.end())
      throw FieldError(below(path, key),
                       fmt::format("{}; expected one of {}{}", why, fmt::join(known, ", "), did_you_mean(key, known)));
}

void take_object(const Settings& all, const Json& object, const std::string& path, const std::string& why) {
  if (!object.is_object()) throw FieldError(path, "expected an object, got " + object.dump());
  for (const Setting& s : all) {
    const auto* number = std::get_if<int64_t*>(&s.at);
    if (const auto found = object.find(s.name); found != object.end())
      take_value(s, *found, below(path, s.name));
    else if (number && !s.field.open && static_cast<double>(**number) < s.field.range.min)
      throw FieldError(below(path, s.name), "required, but missing");
  }
  check_keys(object, path, all.names(), why);
}

void take_json(const Settings& all, std::string_view text, std::string_view what) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) throw Error(fmt::format("{}: expected a JSON object, got {}", what, text));
  take_object(all, json, "", fmt::format("unknown field of {}", what));
}

Json identity_fields(const Settings& all, const Settings& defaults, IdentityRole Field::*role) {
  Json out = Json::object();
  for (const Setting& s : all) {
    const IdentityRole when = s.field.*role;
    const bool differs = s.text() != defaults.at(s.name).text();
    if (when != IdentityRole::no && (when == IdentityRole::yes || differs) && applies(s, all))
      out[std::string(s.name)] = to_json(s);
  }
  return out;
}

Ordered make_entry(const Setting& s, std::string (*shown)(const std::string& help)) {
  const Field& f = s.field;
  Ordered out = {{"name", f.place ? std::string(s.name) : s.word()}};
  if (f.place) out["place"] = true;
  if (!f.place && !s.field.denied.empty()) out["denies"] = s.name;
  if (!f.group.empty()) out["group"] = f.group;
  out["kind"] = s.kind();
  // empty() is false for "". NOLINTNEXTLINE(readability-container-size-empty)
  if (const Ordered value = to_json(s); !f.open && !value.empty() && value != "") out["default"] = value;
  const bool number = s.kind() == "integer" || s.kind() == "number";
  if (number && f.range.min > -1e300) out["least"] = f.range.min;
  if (number && f.range.max < 1e300) out[f.range.max_excluded ? "below" : "most"] = f.range.max;
  if (const std::string choices = s.choices(); !choices.empty()) out["choices"] = split(choices, '|');
  if (f.fraction) out["share"] = std::string(1, f.unit_suffix);
  if (f.repeated) out["repeated"] = true;
  if (!f.in_file) out["in_file"] = false;
  out["help"] = shown(std::string(s.help));
  return out;
}

}  // namespace tessera
