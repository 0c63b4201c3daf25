// Fields from JSON and to JSON.
#include "settings/json.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tensor/error.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

// Takes a JSON value into the member of a struct, by the member's type.
struct Taker {
  const Setting& setting;
  const Json& from;

  [[noreturn]] void refuse(const std::string& expected, const std::string& meant = "") const {
    throw FieldError(std::string(setting.field.name),
                     fmt::format("expected {}, found {}{}", expected, from.dump(), meant));
  }
  void operator()(int64_t* to) const {
    if (!from.is_number_integer()) refuse("a whole number");
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
    for (const Json& one : from) Taker{setting, one}(&to->emplace_back());
  }
  void operator()(const Choice& c) const {
    const std::string said = c.is_number()      ? from.is_number_integer() ? from.dump() : ""
                             : from.is_string() ? from.get<std::string>()
                                                : "";
    const auto found = std::ranges::find(c.names, setting.field.renames ? setting.field.renames(said) : said);
    if (found == c.names.end()) {
      if (!c.is_number()) refuse(fmt::format("{}", fmt::join(c.names, ", ")), did_you_mean(said, c.names));
      refuse(fmt::format("{} or {}", fmt::join(c.names.first(c.names.size() - 1), ", "), c.names.back()));
    }
    c.set(c.at, found - c.names.begin());
  }
  template <class T>
  void operator()(std::optional<T>* to) const {
    operator()(&to->emplace());
  }
};

struct Giver {
  Json operator()(const Choice& c) const { return c.is_number() ? Json(c.get(c.at)) : Json(c.name()); }
  template <class T>
  Json operator()(const T* v) const {
    return *v;
  }
  template <class T>
  Json operator()(const std::optional<T>* v) const {
    return *v ? Json(**v) : Json();
  }
};

}  // namespace

Json json_of(const Setting& setting) { return std::visit(Giver(), setting.at); }

Json json_of(const Settings& all) {
  Json out = Json::object();
  for (const Setting& s : all)
    if (Json value = json_of(s); !value.is_null() && value != "") out[std::string(s.field.name)] = std::move(value);
  return out;
}

void take_json(const Settings& all, std::string_view text, std::string_view what) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) throw Error(fmt::format("{}: expected a JSON object, found {}", what, text));
  for (const Setting& s : all)
    if (const auto found = json.find(s.field.name); found != json.end()) std::visit(Taker{s, *found}, s.at);
  const std::vector<std::string> known = all.names();
  for (const auto& [key, value] : json.items())
    if (!all.find(key))
      throw FieldError(key, fmt::format("no field of {}; expected one of {}{}", what, fmt::join(known, ", "),
                                        did_you_mean(key, known)));
}

nlohmann::json identity_of(const Settings& all, const Settings& usual) {
  nlohmann::json out = nlohmann::json::object();
  for (const Setting& s : all) {
    const bool differs = s.text() != usual.at(s.field.name).text();
    if (s.field.same == Same::yes || (s.field.same == Same::unless_usual && differs && applies(s, all)))
      out[std::string(s.field.name)] = json_of(s);
  }
  return out;
}

Json entry_of(const Setting& s, std::string (*shown)(const std::string& help)) {
  const Field& f = s.field;
  Json out = {{"name", f.place ? std::string(f.name) : s.word()}};
  if (f.place) out["place"] = true;
  if (!f.place && !s.field.denied.empty()) out["denies"] = f.name;
  if (!f.group.empty()) out["group"] = f.group;
  out["kind"] = s.kind();
  if (const Json value = json_of(s); !f.open && !value.empty() && value != "") out["default"] = value;
  const bool number = s.kind() == "integer" || s.kind() == "number";
  if (number && f.range.least > -1e300) out["least"] = f.range.least;
  if (number && f.range.most < 1e300) out[f.range.most_excluded ? "below" : "most"] = f.range.most;
  if (const std::string choices = s.choices(); !choices.empty()) out["choices"] = split(choices, '|');
  if (f.repeated) out["repeated"] = true;
  if (!f.in_file) out["in_file"] = false;
  out["help"] = shown(std::string(f.help));
  return out;
}

}  // namespace tessera
