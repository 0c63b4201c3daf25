// Parsing and formatting of field values, and queries on descriptors.
#include "base/setting.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <system_error>

#include "base/error.h"
#include "base/utf8.h"

namespace tessera {
namespace {

// `above`: the number exceeds every range, so print an upper bound even if the range has none.
std::string bounds_text(const Bounds& range, bool above = false) {
  const bool low = range.min > -1e300, high = range.max < 1e300 || above;
  if (low && high) return fmt::format(" in [{}, {}{}", range.min, range.max, range.max_excluded ? ")" : "]");
  return low ? fmt::format(" of at least {}", range.min) : "";
}

bool contains(const Bounds& range, double v) {
  return v >= range.min && (range.max_excluded ? v < range.max : v <= range.max);
}

[[noreturn]] void wrong(const std::string& where, std::string_view expected, std::string_view found) {
  throw Error(fmt::format("{}: expected {}, got '{}'", where, expected, found));
}

void check_choice(const std::string& where, const std::string& choices, const std::string& text) {
  const std::vector<std::string> allowed = split(choices, '|');
  if (std::ranges::find(allowed, text) == allowed.end())
    throw Error(
        fmt::format("{}: expected {}, got '{}'{}", where, fmt::join(allowed, ", "), text, did_you_mean(text, allowed)));
}

struct Reader {
  const Setting& setting;
  const std::string &where, &text;

  void operator()(int64_t* to) const { *to = parse_integer(where, text, setting.field.range); }
  void operator()(double* to) const {
    const Bounds& range = setting.field.range;
    double v = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
    const bool parsed = error == std::errc() && end == text.data() + text.size();
    if (!parsed || !std::isfinite(v) || !contains(range, v))
      wrong(where, "a number" + bounds_text(range, v > range.max || error == std::errc::result_out_of_range), text);
    *to = v;
  }
  void operator()(bool* to) const {
    if (text != "true" && text != "false") wrong(where, "true or false", text);
    *to = (text == "true") == setting.field.denied.empty();
  }
  void operator()(std::string* to) const {
    const Field& f = setting.field;
    if (!f.choices.empty()) check_choice(where, std::string(f.choices), text);
    if (text.empty()) wrong(where, f.expected.empty() ? "a value" : f.expected, text);
    if (f.expected.empty() && find_invalid_utf8(text) != std::string_view::npos) wrong(where, "UTF-8", text);
    *to = text;
  }
  void operator()(std::vector<int64_t>* to) const {
    to->clear();
    for (const std::string& part : split(text, ',')) to->push_back(parse_integer(where, part, setting.field.range));
  }
  void operator()(std::vector<std::string>* to) const {
    if (setting.field.repeated) return to->push_back(text);
    std::string joined;
    operator()(&joined);
    *to = split(joined, ',');
  }
  void operator()(const Choice& c) const {
    if (c.is_number()) return c.set(c.at, parse_integer(where, text, setting.field.range));
    if (!c.file) check_choice(where, setting.choices(), text);
    const auto found = std::ranges::find(c.names, setting.field.renames ? setting.field.renames(text) : text);
    if (c.file) *c.file = found == c.names.end() ? text : "";
    if (c.file && found == c.names.end()) return operator()(c.file);
    c.set(c.at, found - c.names.begin());
  }
  template <class T>
  void operator()(std::optional<T>* to) const {
    T value{};
    operator()(&value);
    *to = std::move(value);
  }
};

struct Writer {
  const Setting& setting;

  std::string operator()(const int64_t* v) const { return std::to_string(*v); }
  std::string operator()(const double* v) const { return fmt::format("{}", *v); }
  std::string operator()(const bool* v) const { return *v == setting.field.denied.empty() ? "true" : "false"; }
  std::string operator()(const std::string* v) const { return *v; }
  std::string operator()(const std::vector<int64_t>* v) const { return fmt::format("{}", fmt::join(*v, ",")); }
  std::string operator()(const std::vector<std::string>* v) const { return fmt::format("{}", fmt::join(*v, ",")); }
  std::string operator()(const Choice& c) const { return c.file && !c.file->empty() ? *c.file : std::string(c.name()); }
  template <class T>
  std::string operator()(const std::optional<T>* v) const {
    return *v ? operator()(&**v) : "";
  }
};

}  // namespace

std::vector<std::string> split(std::string_view text, char at) {
  std::vector<std::string> out;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(at, begin), text.size());
    out.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

int64_t parse_integer(const std::string& where, const std::string& text, const Bounds& range) {
  int64_t v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  const bool parsed = error == std::errc() && end == text.data() + text.size();
  if (!parsed || !contains(range, static_cast<double>(v))) wrong(where, "an integer" + bounds_text(range), text);
  return v;
}

std::string Setting::word() const {
  std::string out(field.denied.empty() ? name : field.denied);
  std::ranges::replace(out, '_', '-');
  return out;
}

bool Setting::is_text() const {
  const auto* named = std::get_if<Choice>(&at);
  return named ? !named->is_number() : kind() == "text" || kind() == "choice" || kind() == "texts";
}

std::string_view Setting::kind() const {
  constexpr std::string_view kinds[] = {"integer", "number", "flag",     "text",  "integer",
                                        "number",  "text",   "integers", "texts", "choice"};
  if (const auto* named = std::get_if<Choice>(&at))
    return named->is_number() ? "integer" : named->file ? "text" : "choice";
  return field.choices.empty() ? kinds[at.index()] : "choice";
}

std::string Setting::choices() const {
  const auto* named = std::get_if<Choice>(&at);
  if (!named || !field.choices.empty()) return std::string(field.choices);
  return named->is_number() || named->file ? "" : fmt::format("{}", fmt::join(named->names, "|"));
}

void Setting::read(const std::string& where, const std::string& text) const {
  if (field.fraction) *field.fraction = 0;
  if (!field.fraction || !text.ends_with(field.unit_suffix)) return std::visit(Reader{*this, where, text}, at);
  const bool percent = field.unit_suffix == '%';
  const Setting number{name, field.fraction, {}, {.range = {0, percent ? 100.0 : 1e9}}};
  number.read(where, text.substr(0, text.size() - 1));
  if (*field.fraction == 0) wrong(where, percent ? "a percentage above 0%" : "more than 0 epochs", text);
  if (percent) *field.fraction /= 100;
}

std::string Setting::text() const {
  if (field.fraction && *field.fraction > 0)
    return fmt::format("{}{}", field.unit_suffix == '%' ? 100 * *field.fraction : *field.fraction, field.unit_suffix);
  return std::visit(Writer{*this}, at);
}

std::string Setting::written() const {
  const std::string plain = text();
  if (is_text() || (field.fraction && *field.fraction > 0)) return plain.empty() ? "" : quoted_text(plain);
  const bool real = kind() == "number" && !plain.empty();
  return real && plain.find_first_of(".e") == std::string::npos ? plain + ".0" : plain;
}

void Setting::assign(const Setting& same) const {
  if (field.fraction) *field.fraction = *same.field.fraction;
  std::visit(
      [&]<class T>(const T& to) {
        const T& from = std::get<T>(same.at);
        if constexpr (std::is_same_v<T, Choice>) {
          to.set(to.at, from.get(from.at));
          if (to.file) *to.file = *from.file;
        } else {
          *to = *from;
        }
      },
      at);
}

void Settings::add(const Setting& setting) {
  all_.push_back(setting);
  if (const auto* named = std::get_if<Choice>(&setting.at); named && named->is_number())
    all_.back().field.range = {0, static_cast<double>(named->names.size() - 1)};
}

void Settings::add(std::string_view group, const Settings& settings) {
  for (Setting s : settings) {
    if (s.field.group.empty()) s.field.group = group;
    all_.push_back(s);
  }
}

void Settings::move(std::string_view name, std::string_view after) {
  const auto which = std::ranges::find(all_, name, [](const Setting& s) { return s.name; });
  const Setting moved = *which;
  all_.erase(which);
  all_.insert(std::ranges::find(all_, after, [](const Setting& s) { return s.name; }) + 1, moved);
}

void Settings::sort(std::span<const std::string_view> groups) {
  std::ranges::stable_sort(all_, {}, [&](const Setting& s) { return std::ranges::find(groups, s.field.group); });
}

const Setting* Settings::find(std::string_view name) const {
  const auto found = std::ranges::find(all_, name, [](const Setting& s) { return s.name; });
  return found == all_.end() ? nullptr : &*found;
}

const Setting* Settings::find_word(std::string_view word) const {
  const auto found = std::ranges::find_if(all_, [&](const Setting& s) { return s.field.in_words && s.word() == word; });
  return found == all_.end() ? nullptr : &*found;
}

const Setting& Settings::at(std::string_view name) const {
  if (const Setting* found = find(name)) return *found;
  throw Error(fmt::format("[settings] unknown field `{}`", name));
}

std::vector<std::string> Settings::names() const {
  std::vector<std::string> out;
  for (const Setting& s : all_) out.emplace_back(s.name);
  return out;
}

bool applies(const Setting& setting, const Settings& all) {
  const std::string_view with = setting.field.goes_with;
  if (with.empty()) return true;
  const size_t space = std::min(with.find(' '), with.size());
  const std::string value = all.at(with.substr(0, space)).text();
  if (space == with.size()) return value != "0" && value != "none";
  const std::vector<std::string> values = split(with.substr(space + 1), ' ');
  return std::ranges::find(values, value) != values.end();
}

void check_minimum(const Settings& all, const Settings& defaults) {
  for (const Setting& s : all) {
    const auto* found = std::get_if<int64_t*>(&s.at);
    if (!found) continue;
    const auto none = static_cast<double>(*std::get<int64_t*>(defaults.at(s.name).at));  // 0 if derived
    const double min = std::min(s.field.range.min, none);
    if (static_cast<double>(**found) < min)
      throw FieldError(std::string(s.name), fmt::format("expected at least {}, got {}", min, **found));
  }
}

void check_read(const Settings& all, const Settings& defaults) {
  for (const Setting& s : all) {
    const std::string expected = defaults.at(s.name).text();
    if (s.text() == expected || applies(s, all)) continue;
    const std::string_view with = s.field.goes_with, owner = with.substr(0, with.find(' '));
    throw FieldError(
        std::string(s.name),
        fmt::format("requires `{}`{}, got {}{}", owner, with.substr(owner.size()), all.at(owner).text(),
                    expected.empty() ? "" : fmt::format("; nearest valid value: {}, the default", expected)));
  }
}

std::string difference(const Settings& from, const Settings& defaults) {
  const auto value = [](const Setting& s) {  // the file is a separate field
    const auto* named = std::get_if<Choice>(&s.at);
    return named ? std::string(named->name()) : s.is_text() ? s.text() : s.written();
  };
  std::string out;
  for (const Setting& s : from)
    if (value(s) != value(defaults.at(s.name))) out += fmt::format("{}{}={}", out.empty() ? "" : " ", s.name, value(s));
  return out;
}

}  // namespace tessera
