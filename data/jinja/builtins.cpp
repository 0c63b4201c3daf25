// Tables of filters, tests, functions and methods.
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <ctime>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bad_input.h"
#include "base/utf8.h"
#include "data/jinja/value.h"

namespace tessera::jinja {

const Value& Call::at(size_t i) const {
  static const Value kNone;
  return i < given.size() ? given[i] : kNone;
}
const std::string& Call::exact(size_t i) const {
  if (!at(i).text()) bad_input("expected a string, got {}", type_name(at(i)));
  return *at(i).text();
}
int64_t Call::int_at(size_t i, int64_t otherwise) const {
  if (has(i) && !integer(at(i))) bad_input("expected an integer, got {}", type_name(at(i)));
  return integer(at(i)).value_or(otherwise);
}

namespace {

using std::u32string_view;
using Point = utf8proc_int32_t;

// Index of a word in a space-separated list.
std::optional<size_t> find_substring(std::string_view names, std::string_view word) {
  for (size_t place = 0; !names.empty(); ++place) {
    const size_t end = std::min(names.find(' '), names.size());
    if (names.substr(0, end) == word) return place;
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return std::nullopt;
}

// trim, strip, lstrip and rstrip
Value strip(const Call& c) {
  const bool blanks = c.at(1).is<None>() || c.given.size() < 2;
  return std::string(stripped(c.text(0), c.name != "rstrip", c.name != "lstrip", blanks ? nullptr : &c.exact(1)));
}

// `first` converts the first character of each word; others become lower case. A word begins where `begins` accepts the
// preceding character (0: none).
std::string cased(std::string_view s, bool (*begins)(char32_t), Point (*first)(Point) = utf8proc_totitle) {
  std::u32string points = code_points(s);
  char32_t before = 0;
  for (char32_t& c : points) {
    const auto made = begins(std::exchange(before, c)) ? first : utf8proc_tolower;
    c = static_cast<char32_t>(made(static_cast<Point>(c)));
  }
  return utf8(points);
}
bool never(char32_t) { return false; }
bool always(char32_t) { return true; }
bool is_first(char32_t before) { return before == 0; }
bool is_opening(char32_t before) {
  return before == 0 || is_space(before) || u32string_view(U"-({[<").find(before) != u32string_view::npos;
}
bool is_no_letter(char32_t before) {
  const auto c = static_cast<Point>(before);
  return utf8proc_tolower(c) == c && utf8proc_toupper(c) == c;
}
Value lower(const Call& c) { return cased(c.text(0), never); }
Value capitalised(const Call& c) { return cased(c.text(0), is_first); }

std::string replaced(RenderContext& work, const std::string& s, const std::string& old, const std::string& by,
                     int64_t limit) {
  std::string out;
  size_t begin = 0;
  for (size_t at = 0; limit != 0 && at <= s.size(); --limit) {
    const size_t found = s.find(old, at);
    if (found == std::string::npos) break;
    out.append(s, begin, found - begin).append(by);
    work.charge(by.size() + 1);
    begin = at = found + old.size();
    if (old.empty() && at == s.size()) break;
    if (old.empty()) next_code_point(s, at);
  }
  return out.append(s, begin);
}
Value upper(const Call& c) { return cased(replaced(c.work, c.text(0), "ß", "SS", -1), always, utf8proc_toupper); }

Values to_lines(const std::string& s) {
  Values out;
  std::u32string line;
  const std::u32string points = code_points(s);
  for (size_t i = 0; i < points.size(); ++i) {
    const bool ends = u32string_view(U"\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029").find(points[i]) != u32string_view::npos;
    if (!ends) line += points[i];
    if (ends || i + 1 == points.size()) out.emplace_back(utf8(std::exchange(line, {})));
    if (points[i] == '\r' && i + 1 < points.size() && points[i + 1] == '\n') ++i;
  }
  return out;
}

Value split(const Call& c) {
  std::string_view s = c.exact(0);
  c.work.charge(64 + 64 * s.size());
  int64_t limit = c.int_at(2, -1);
  Values out;
  if (c.has(1)) {
    const std::string& by = c.exact(1);
    if (by.empty()) throw InputError("splitting at an empty separator is not supported");
    for (size_t end = s.find(by); limit-- != 0 && end != std::string_view::npos; end = s.find(by)) {
      out.emplace_back(std::string(s.substr(0, end)));
      s.remove_prefix(end + by.size());
    }
    out.emplace_back(std::string(s));
  }
  while (!c.has(1) && !(s = stripped(s, true, false)).empty()) {
    const std::string_view rest = tessera::stripped(s, true, false, [](char32_t p) { return !is_space(p); });
    const size_t end = limit-- == 0 ? s.size() : s.size() - rest.size();
    out.emplace_back(std::string(s.substr(0, end)));
    s.remove_prefix(end);
  }
  return make_sequence(c.work, std::move(out));
}
// `path` is dotted: "a.b.c".
Value at_path(RenderContext& work, Value v, const Value& path) {
  if (!path.text()) return path.is<Undefined>() || path.is<None>() ? v : item(work, v, path);
  if (path.text()->find_first_of(",0123456789") != std::string::npos)
    bad_input("the attribute '{}' is not supported", path.text()->substr(0, 40));
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = path.text()->find('.', begin);
    v = item(work, v, path.text()->substr(begin, end - begin));
  }
  return v;
}
// Keys are the values at `path`; strings compare case-insensitively.
Value sorted(RenderContext& work, const Values& items, const Value& path) {
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& v : items) {
    const Value key = at_path(work, v, path);
    keyed.emplace_back(key.text() ? Value(cased(*key.text(), never)) : key, v);
  }
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return !compare(work, "==", a.first, b.first) && compare(work, "<", a.first, b.first);
  });
  Values out;
  for (auto& [key, value] : keyed) out.push_back(std::move(value));
  return make_sequence(work, std::move(out));
}
Value pairs(const Call& c, Form form) {
  const Dict* const dict = c.at(0).dict();
  if (!dict && !c.at(0).is<Undefined>()) bad_input("expected a mapping, got {}", type_name(c.at(0)));
  Values out;
  for (const auto& [key, value] : dict ? dict->items : Pairs())
    out.push_back(make_sequence(c.work, {Value(key), value}, Form::tuple));
  return make_sequence(c.work, std::move(out), form);
}
Value length(const Call& c) {
  const Value& v = c.at(0);
  if (v.is<Undefined>()) return int64_t{0};
  if (v.text()) return std::count_if(v.text()->begin(), v.text()->end(), [](char b) { return (b & 0xC0) != 0x80; });
  if (v.dict()) return std::ssize(v.dict()->items);
  if (!v.sequence() || v.sequence()->form == Form::iterator) bad_input("{} has no length", type_name(v));
  return std::ssize(v.sequence()->items);
}
std::string joined(RenderContext& work, const std::string& between, const Values& texts) {
  std::string out;
  for (const Value& v : texts) {
    work.charge(between.size());
    if (&v != texts.data()) out += between;
    out += Call{work, {v}}.exact(0);
  }
  return out;
}
// The filters first and last. On an iterator, `first` consumes only one item.
Value suffix_test(const Call& c) {
  const bool last = c.name == "last";
  if (last) length(c);
  Values items = to_items(c.work, c.at(0));
  if (items.empty()) return Undefined{};
  Value out = last ? items.back() : items.front();
  Sequence* const s = c.at(0).sequence();
  if (s && s->form == Form::iterator) s->items.assign(items.begin() + 1, items.end());
  return out;
}
std::string indentation(const Call& c, size_t i, int64_t otherwise) {
  if (c.at(i).text()) return c.text(i);
  const auto width = static_cast<size_t>(std::max<int64_t>(c.int_at(i, otherwise), 0));
  c.work.charge(width);
  return std::string(width, ' ');
}

// Applies to `v` the filter or test named by argument number `name`, with the arguments after it.
Value applied(const Call& c, Group group, const Value& v, size_t name) {
  const auto found = find_builtin(group, c.exact(name));
  if (!found) bad_input("unknown filter or test '{}'", c.exact(name));
  Call to{c.work, {v}, c.named};
  to.given.insert(to.given.end(), c.given.begin() + static_cast<std::ptrdiff_t>(name) + 1, c.given.end());
  return apply(*found, std::move(to));
}
// A falsy value counts as an empty sequence here, even if it is not iterable.
Values items_if_true(const Call& c) { return truth(c.at(0)) ? to_items(c.work, c.at(0)) : Values(); }
// select, reject, selectattr and rejectattr
Value selected(const Call& c) {
  const bool wanted = c.name.starts_with("select"), by_path = c.name.ends_with("attr");
  const size_t test = by_path ? 2 : 1;
  if (c.given.size() < test) throw InputError("an attribute is missing");
  Values out;
  for (const Value& v : items_if_true(c)) {
    const Value of = by_path ? at_path(c.work, v, c.at(1)) : v;
    if (truth(c.given.size() > test ? applied(c, Group::tests, of, test) : of) == wanted) out.push_back(v);
  }
  return make_sequence(c.work, std::move(out), Form::iterator);
}
Value mapped(const Call& c) {
  std::map<std::string, Value> named(c.named.begin(), c.named.end());
  const bool by_path = named.contains("attribute");
  if (!by_path && c.given.size() < 2) throw InputError("`map` needs a filter or an attribute");
  Values out = items_if_true(c);
  for (Value& v : out) {
    v = by_path ? at_path(c.work, v, named["attribute"]) : applied(c, Group::filters, v, 1);
    if (by_path && v.is<Undefined>()) v = named["default"];
  }
  return make_sequence(c.work, std::move(out), Form::iterator);
}

constexpr Builtin kFilters[] = {
    {"capitalize", "s", capitalised},
    {"default d", "value default_value boolean",
     [](const Call& c) -> Value {
       const bool missing = c.at(0).is<Undefined>() || (truth(c.at(2)) && !truth(c.at(0)));
       return !missing ? c.at(0) : c.given.size() > 1 ? c.at(1) : Value(std::string());
     }},
    {"dictsort", "value",
     [](const Call& c) {
       if (!c.at(0).dict()) throw InputError("expected a mapping to sort");
       return sorted(c.work, pairs(c, Form::list).sequence()->items, int64_t{0});
     }},
    {"first last", "seq", suffix_test},
    {"indent", "s width first blank",
     [](const Call& c) -> Value {
       const std::string indent = indentation(c, 1, 4);
       Values lines = to_lines(c.exact(0) + "\n");
       for (Value& line : lines) {
         c.work.charge(indent.size());
         if (&line == lines.data() ? truth(c.at(2)) : truth(line) || truth(c.at(3))) line = indent + *line.text();
       }
       return joined(c.work, "\n", lines);
     }},
    {"int", "value",
     [](const Call& c) -> Value {
       const auto real = number(c.at(0));
       if (!real || std::fabs(*real) > 9.2e18) bad_input("cannot convert {} to an integer", type_name(c.at(0)));
       return integer(c.at(0)).value_or(static_cast<int64_t>(*real));
     }},
    {"items", "value", [](const Call& c) { return pairs(c, Form::iterator); }},
    {"join", "value d attribute",
     [](const Call& c) -> Value {
       Values items = to_items(c.work, c.at(0));
       for (Value& v : items) v = printed(c.work, at_path(c.work, v, c.at(2)));
       return joined(c.work, c.text(1), items);
     }},
    {"length count", "value", length},
    {"list", "value", [](const Call& c) { return make_sequence(c.work, to_items(c.work, c.at(0))); }},
    {"lower", "s", lower},
    {"map", "*", mapped},
    {"replace", "s old new count",
     [](const Call& c) -> Value { return replaced(c.work, c.text(0), c.text(1), c.text(2), c.int_at(3, -1)); }},
    {"reverse", "value",
     [](const Call& c) -> Value {
       const bool read = c.at(0).sequence() && c.at(0).sequence()->form == Form::iterator;
       Values items = to_items(c.work, c.at(0));
       std::reverse(items.begin(), items.end());
       if (c.at(0).text()) return joined(c.work, "", items);
       return make_sequence(c.work, std::move(items), read ? Form::list : Form::iterator);
     }},
    {"safe", "value",
     [](const Call& c) {
       Value out = c.text(0);
       out.marked = true;
       return out;
     }},
    {"select reject selectattr rejectattr", "*", selected},
    {"sort", "value attribute", [](const Call& c) { return sorted(c.work, to_items(c.work, c.at(0)), c.at(1)); }},
    {"string", "s", [](const Call& c) -> Value { return c.at(0).text() ? c.at(0) : c.text(0); }},
    {"title", "s", [](const Call& c) -> Value { return cased(c.text(0), is_opening); }},
    {"tojson", "value ensure_ascii indent separators sort_keys",
     [](const Call& c) -> Value {
       Style style{.json = true, .ascii = truth(c.at(1)), .sorted = truth(c.at(4))};
       if (c.has(2)) style.indent = indentation(c, 2, 0), style.comma = ",";
       const Values two = c.has(3) ? to_items(c.work, c.at(3)) : Values{style.comma, style.colon};
       if (two.size() != 2) throw InputError("expected two separators");
       style.comma = printed(c.work, two[0]), style.colon = printed(c.work, two[1]);
       return written(c.work, c.at(0), style);
     }},
    {"trim", "value chars", strip},
    {"upper", "s", upper},
};

template <class T>
Value is_a(const Call& c) {
  return c.at(0).is<T>();
}
bool is_iterable(const Value& v) { return v.text() || v.dict() || v.sequence() || v.is<Undefined>(); }
constexpr Builtin kTests[] = {
    {"!= ne", "a b", [](const Call& c) -> Value { return compare(c.work, "!=", c.at(0), c.at(1)); }},
    {"< lt lessthan", "a b", [](const Call& c) -> Value { return compare(c.work, "<", c.at(0), c.at(1)); }},
    {"<= le", "a b", [](const Call& c) -> Value { return compare(c.work, "<=", c.at(0), c.at(1)); }},
    {"== eq equalto", "a b", [](const Call& c) -> Value { return compare(c.work, "==", c.at(0), c.at(1)); }},
    {"> gt greaterthan", "a b", [](const Call& c) -> Value { return compare(c.work, ">", c.at(0), c.at(1)); }},
    {">= ge", "a b", [](const Call& c) -> Value { return compare(c.work, ">=", c.at(0), c.at(1)); }},
    {"boolean", "value", is_a<bool>},
    {"defined", "value", [](const Call& c) -> Value { return !c.at(0).is<Undefined>(); }},
    {"even odd", "value",
     [](const Call& c) -> Value {
       return compare(c.work, "==", operated(c.work, "%", c.at(0), int64_t{2}), int64_t{c.name == "odd"});
     }},
    {"float", "value", is_a<double>},
    {"in", "value seq", [](const Call& c) -> Value { return compare(c.work, "in", c.at(0), c.at(1)); }},
    {"integer", "value", is_a<int64_t>},
    {"iterable", "value", [](const Call& c) -> Value { return is_iterable(c.at(0)); }},
    {"mapping", "value", is_a<std::shared_ptr<const Dict>>},
    {"none", "value", is_a<None>},
    {"number", "value", [](const Call& c) -> Value { return number(c.at(0)).has_value(); }},
    {"sequence", "value",
     [](const Call& c) -> Value {
       const Sequence* const s = c.at(0).sequence();
       return is_iterable(c.at(0)) && !(s && s->form > Form::range);
     }},
    {"string", "value", is_a<Text>},
    {"true false", "value",
     [](const Call& c) -> Value { return c.at(0).is<bool>() && truth(c.at(0)) == (c.name == "true"); }},
    {"undefined", "value", is_a<Undefined>},
};

void require_names(const Call& c) {
  if (!c.given.empty()) throw InputError("`dict` and `namespace` accept only named arguments");
}
constexpr Builtin kGlobals[] = {
    {"dict", "*", [](const Call& c) { return require_names(c), make_dict(c.work, c.named); }},
    {"namespace", "*",
     [](const Call& c) {
       require_names(c);
       return c.work.store({.fields = std::map<std::string, Value>(c.named.begin(), c.named.end())});
     }},
    {"raise_exception", "message",
     [](const Call& c) -> Value { throw InputError("the template raises an error: " + c.text(0)); }},
    {"range", "start stop step",
     [](const Call& c) {
       const int64_t one = c.int_at(0, 0), step = c.int_at(2, 1);
       const int64_t start = c.has(1) ? one : 0, stop = c.has(1) ? c.int_at(1, 0) : one;
       if (step == 0 || !c.has(0)) throw InputError("a range requires a bound and a nonzero step");
       Values items;
       for (__int128 i = start; step > 0 ? i < stop : i > stop; i += step) {
         if (items.size() == 100000) throw InputError("a range of more than 100000 items");
         items.emplace_back(static_cast<int64_t>(i));
       }
       return make_sequence(c.work, std::move(items), Form::range);
     }},
    {"strftime_now", "format",
     [](const Call& c) -> Value {
       if (c.exact(0).size() > 200) throw InputError("a date format is longer than 200 bytes");
       const std::time_t now = std::time(nullptr);
       std::tm fields = {};
       localtime_r(&now, &fields);
       char out[20000];
       return std::string(out, std::strftime(out, sizeof(out), c.exact(0).c_str(), &fields));
     }},
};

constexpr Builtin kTextMethods[] = {
    {"capitalize", "s", capitalised},
    {"endswith", "s suffix", [](const Call& c) -> Value { return c.exact(0).ends_with(c.exact(1)); }},
    {"join", "s items", [](const Call& c) -> Value { return joined(c.work, c.exact(0), to_items(c.work, c.at(1))); }},
    {"lower", "s", lower},
    {"replace", "s old new count",
     [](const Call& c) -> Value { return replaced(c.work, c.exact(0), c.exact(1), c.exact(2), c.int_at(3, -1)); }},
    {"split", "s sep maxsplit", split},
    {"splitlines", "s", [](const Call& c) { return make_sequence(c.work, to_lines(c.text(0))); }},
    {"startswith", "s prefix", [](const Call& c) -> Value { return c.exact(0).starts_with(c.exact(1)); }},
    {"strip lstrip rstrip", "s chars", strip},
    {"title", "s", [](const Call& c) -> Value { return cased(c.text(0), is_no_letter); }},
    {"upper", "s", upper},
};
constexpr Builtin kDictMethods[] = {
    {"get", "dict key default",
     [](const Call& c) -> Value {
       const Value* const found = find(c.work, *c.at(0).dict(), to_key(c.at(1)));
       return found ? *found : c.given.size() > 2 ? c.at(2) : None{};
     }},
    {"items", "dict", [](const Call& c) { return pairs(c, Form::view); }},
    {"keys values", "dict",
     [](const Call& c) {
       Values out;
       for (const auto& [key, value] : c.at(0).dict()->items) out.push_back(c.name == "keys" ? Value(key) : value);
       return make_sequence(c.work, std::move(out), Form::view);
     }},
};

}  // namespace

std::optional<Builtin> find_builtin(Group group, std::string_view name) {
  static constexpr std::array<std::span<const Builtin>, 5> kAll = {kFilters, kTests, kGlobals, kTextMethods,
                                                                   kDictMethods};
  for (Builtin b : kAll[static_cast<size_t>(group)])
    if (find_substring(b.name, name)) return b.name = b.name.substr(b.name.find(name), name.size()), b;
  return std::nullopt;
}

std::optional<Builtin> find_method(const Value& of, const Value& key) {
  if (!key.text() || !(of.text() || of.dict())) return std::nullopt;
  return find_builtin(of.text() ? Group::text : Group::dict, *key.text());
}

Value apply(const Builtin& builtin, Call c) {
  c.name = builtin.name;
  c.work.charge(32);
  for (const Value& v : c.given)
    if (v.text()) c.work.charge(v.text()->size());
  if (c.at(0).marked && !find_builtin(Group::tests, c.name) &&
      !find_substring("safe string length count tojson default d", c.name))
    bad_input("'{}' is not supported on a string marked as `safe`", c.name);
  if (builtin.parameters == "*") return builtin.function(c);
  for (auto& [name, value] : std::exchange(c.named, {})) {
    const auto place = find_substring(builtin.parameters, name);
    if (!place || *place < c.given.size()) bad_input("'{}' has no argument '{}', or it is passed twice", c.name, name);
    c.given.resize(*place + 1);
    c.given[*place] = std::move(value);
  }
  if (std::ssize(c.given) > 1 + std::count(builtin.parameters.begin(), builtin.parameters.end(), ' '))
    bad_input("'{}' is called with too many arguments", c.name);
  return builtin.function(c);
}

}  // namespace tessera::jinja
