// Filters, tests, functions and methods: each is one entry of a table.
#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <span>

#include "data/jinja/value.h"
#include "data/utf8.h"

namespace tessera::jinja {

const Value& Call::at(size_t i) const {
  static const Value kNone;
  return i < given.size() ? given[i] : kNone;
}
const std::string& Call::exact(size_t i) const {
  if (!at(i).text()) throw InputError(fmt::format("{} stands where a text must", type_name(at(i))));
  return *at(i).text();
}
int64_t Call::whole(size_t i, int64_t otherwise) const {
  if (has(i) && !integer(at(i))) throw InputError(fmt::format("{} stands where an integer must", type_name(at(i))));
  return integer(at(i)).value_or(otherwise);
}

namespace {

using std::u32string_view;
using Point = utf8proc_int32_t;

template <bool kLeft, bool kRight>
Value strip(const Call& c) {
  const bool blanks = c.at(1).is<None>() || c.given.size() < 2;
  return std::string(stripped(c.text(0), kLeft, kRight, blanks ? nullptr : &c.exact(1)));
}

// Each character as `of` makes it, by the character before it (0: none).
template <class F>
std::string cased(std::string_view s, const F& of) {
  std::u32string points = code_points(s);
  char32_t before = 0;
  for (char32_t& c : points) c = static_cast<char32_t>(of(std::exchange(before, c), static_cast<Point>(c)));
  return utf8(points);
}
std::string lower(std::string_view s) {
  return cased(s, [](char32_t, Point c) { return utf8proc_tolower(c); });
}
// A word begins behind a character that is none of a word.
template <bool (*kBegins)(char32_t)>
Value titled(const Call& c) {
  return cased(c.text(0), [](char32_t before, Point point) {
    return kBegins(before) ? utf8proc_totitle(point) : utf8proc_tolower(point);
  });
}
bool is_opening(char32_t before) {
  return before == 0 || is_space(before) || u32string_view(U"-({[<").find(before) != u32string_view::npos;
}
bool is_first(char32_t before) { return before == 0; }
bool is_no_letter(char32_t before) {
  const auto c = static_cast<Point>(before);
  return utf8proc_tolower(c) == c && utf8proc_toupper(c) == c;
}

std::string replaced(Work& work, const std::string& s, const std::string& old, const std::string& by, int64_t most) {
  std::string out;
  size_t begin = 0;
  for (size_t at = 0; most != 0 && at <= s.size(); --most) {
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
Value upper(const Call& c) {
  return cased(replaced(c.work, c.text(0), "ß", "SS", -1), [](char32_t, Point p) { return utf8proc_toupper(p); });
}

Values lines_of(const std::string& s) {
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
  const std::string by = c.has(1) ? c.exact(1) : "";
  if (by.empty() && c.has(1)) throw InputError("a text split by nothing is not known");
  c.work.charge(64 + 64 * s.size());
  Values out;
  for (int64_t most = c.whole(2, -1);; --most) {
    if (by.empty()) s = stripped(s, true, false);
    size_t end = s.find(by), behind = end;
    if (by.empty())
      for (end = behind = 0; behind < s.size() && !is_space(next_code_point(s, behind).value_or(0)); end = behind)
        continue;
    if (most == 0 || end >= s.size()) break;
    out.emplace_back(std::string(s.substr(0, end)));
    s = s.substr(end + by.size());
  }
  if (!by.empty() || !s.empty()) out.emplace_back(std::string(s));
  return sequence_of(c.work, std::move(out));
}
// The value at a path of keys, "a.b.c".
Value at_path(Work& work, Value v, const Value& path) {
  if (!path.text()) return path.is<Undefined>() || path.is<None>() ? v : item(work, v, path);
  if (path.text()->find_first_of(",0123456789") != std::string::npos)
    throw InputError(fmt::format("the attribute '{}' is not known", path.text()->substr(0, 40)));
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = path.text()->find('.', begin);
    v = item(work, v, path.text()->substr(begin, end - begin));
  }
  return v;
}
// By the values at a path, of which texts in small letters.
Value sorted(Work& work, const Values& items, const Value& path) {
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& v : items) {
    const Value key = at_path(work, v, path);
    keyed.emplace_back(key.text() ? Value(lower(*key.text())) : key, v);
  }
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return !compare(work, "==", a.first, b.first) && compare(work, "<", a.first, b.first);
  });
  Values out;
  for (auto& [key, value] : keyed) out.push_back(std::move(value));
  return sequence_of(work, std::move(out));
}
template <Form kForm>
Value pairs(const Call& c) {
  const Dict* const dict = c.at(0).dict();
  if (!dict && !c.at(0).is<Undefined>())
    throw InputError(fmt::format("{} stands where a mapping must", type_name(c.at(0))));
  Values out;
  for (const auto& [key, value] : dict ? dict->items : Pairs())
    out.push_back(sequence_of(c.work, {Value(key), value}, Form::tuple));
  return sequence_of(c.work, std::move(out), kForm);
}
Value length(const Call& c) {
  const Value& v = c.at(0);
  if (v.is<Undefined>()) return int64_t{0};
  if (v.text()) return std::count_if(v.text()->begin(), v.text()->end(), [](char b) { return (b & 0xC0) != 0x80; });
  if (v.dict()) return std::ssize(v.dict()->items);
  if (!v.sequence() || v.sequence()->form == Form::iterator)
    throw InputError(fmt::format("{} has no length", type_name(v)));
  return std::ssize(v.sequence()->items);
}
template <class F>
std::string joined(Work& work, const std::string& between, const Values& items, const F& text_of) {
  std::string out;
  for (const Value& v : items) {
    work.charge(between.size());
    if (&v != items.data()) out += between;
    out += text_of(v);
  }
  return out;
}
// So many spaces, or the text itself.
std::string indent_of(const Call& c, size_t i, int64_t otherwise) {
  if (c.at(i).text()) return c.text(i);
  const auto width = static_cast<size_t>(std::max<int64_t>(c.whole(i, otherwise), 0));
  c.work.charge(width);
  return std::string(width, ' ');
}

// The filter or test whose name is an argument, on a value, with the arguments behind the name.
Value applied(const Call& c, Group group, const Value& v, size_t name) {
  const Builtin* const found = find_builtin(group, c.exact(name));
  if (!found) throw InputError(fmt::format("the filter or test '{}' is not known", c.exact(name)));
  Call to{c.work, {v}, c.named};
  to.given.insert(to.given.end(), c.given.begin() + static_cast<std::ptrdiff_t>(name) + 1, c.given.end());
  return apply(*found, std::move(to));
}
// A false value has no items here, be it a number.
Values items_if_true(const Call& c) { return truth(c.at(0)) ? items_of(c.work, c.at(0)) : Values(); }
template <bool kByAttribute, bool kWanted>
Value selected(const Call& c) {
  constexpr size_t kTest = kByAttribute ? 2 : 1;
  if (c.given.size() < kTest) throw InputError("an attribute is missing");
  Values out;
  for (const Value& v : items_if_true(c)) {
    const Value of = kByAttribute ? at_path(c.work, v, c.at(1)) : v;
    if (truth(c.given.size() > kTest ? applied(c, Group::tests, of, kTest) : of) == kWanted) out.push_back(v);
  }
  return sequence_of(c.work, std::move(out), Form::iterator);
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
  return sequence_of(c.work, std::move(out), Form::iterator);
}

constexpr Builtin kFilters[] = {
    {"capitalize", "s", titled<is_first>},
    {"default", "value default_value boolean",
     [](const Call& c) -> Value {
       const bool missing = c.at(0).is<Undefined>() || (truth(c.at(2)) && !truth(c.at(0)));
       return !missing ? c.at(0) : c.given.size() > 1 ? c.at(1) : Value(std::string());
     }},
    {"dictsort", "value",
     [](const Call& c) {
       if (!c.at(0).dict()) throw InputError("what is no mapping is sorted as one");
       return sorted(c.work, pairs<Form::list>(c).sequence()->items, int64_t{0});
     }},
    {"first", "seq",
     [](const Call& c) -> Value {
       Values items = items_of(c.work, c.at(0));
       if (items.empty()) return Undefined{};
       Value out = items.front();
       items.erase(items.begin());
       Sequence* const s = c.at(0).sequence();
       if (s && s->form == Form::iterator) s->items = std::move(items);
       return out;
     }},
    {"indent", "s width first blank",
     [](const Call& c) -> Value {
       const std::string indent = indent_of(c, 1, 4);
       const Values lines = lines_of(c.exact(0) + "\n");
       return joined(c.work, "\n", lines, [&](const Value& line) {
         c.work.charge(indent.size());
         const bool in = &line == lines.data() ? truth(c.at(2)) : truth(line) || truth(c.at(3));
         return (in ? indent : "") + *line.text();
       });
     }},
    {"int", "value",
     [](const Call& c) -> Value {
       const auto real = number(c.at(0));
       if (!real || std::fabs(*real) > 9.2e18)
         throw InputError(fmt::format("an integer of {} is not known", type_name(c.at(0))));
       return integer(c.at(0)).value_or(static_cast<int64_t>(*real));
     }},
    {"items", "value", pairs<Form::iterator>},
    {"join", "value d attribute",
     [](const Call& c) -> Value {
       return joined(c.work, c.text(1), items_of(c.work, c.at(0)),
                     [&](const Value& v) { return printed(c.work, at_path(c.work, v, c.at(2))); });
     }},
    {"last", "seq",
     [](const Call& c) -> Value {
       length(c);
       const Values items = items_of(c.work, c.at(0));
       return items.empty() ? Undefined{} : items.back();
     }},
    {"length", "value", length},
    {"list", "value", [](const Call& c) { return sequence_of(c.work, items_of(c.work, c.at(0))); }},
    {"lower", "s", [](const Call& c) -> Value { return lower(c.text(0)); }},
    {"map", "*", mapped},
    {"reject", "*", selected<false, false>},
    {"rejectattr", "*", selected<true, false>},
    {"replace", "s old new count",
     [](const Call& c) -> Value { return replaced(c.work, c.text(0), c.text(1), c.text(2), c.whole(3, -1)); }},
    {"reverse", "value",
     [](const Call& c) -> Value {
       const bool read = c.at(0).sequence() && c.at(0).sequence()->form == Form::iterator;
       Values items = items_of(c.work, c.at(0));
       std::reverse(items.begin(), items.end());
       if (c.at(0).text()) return joined(c.work, "", items, [](const Value& v) { return *v.text(); });
       return sequence_of(c.work, std::move(items), read ? Form::list : Form::iterator);
     }},
    {"safe", "value",
     [](const Call& c) {
       Value out = c.text(0);
       out.marked = true;
       return out;
     }},
    {"select", "*", selected<false, true>},
    {"selectattr", "*", selected<true, true>},
    {"sort", "value attribute", [](const Call& c) { return sorted(c.work, items_of(c.work, c.at(0)), c.at(1)); }},
    {"string", "s", [](const Call& c) -> Value { return c.at(0).text() ? c.at(0) : c.text(0); }},
    {"title", "s", titled<is_opening>},
    {"tojson", "value ensure_ascii indent separators sort_keys",
     [](const Call& c) -> Value {
       Style style{.json = true, .ascii = truth(c.at(1)), .sorted = truth(c.at(4))};
       if (c.has(2)) style.indent = indent_of(c, 2, 0), style.comma = ",";
       const Values two = c.has(3) ? items_of(c.work, c.at(3)) : Values{style.comma, style.colon};
       if (two.size() != 2) throw InputError("JSON has two separators");
       style.comma = printed(c.work, two[0]), style.colon = printed(c.work, two[1]);
       return written(c.work, c.at(0), style);
     }},
    {"trim", "value chars", strip<true, true>},
    {"upper", "s", upper},
};

template <class T>
Value is_a(const Call& c) {
  return c.at(0).is<T>();
}
template <bool kWhich>
Value is_truth(const Call& c) {
  return c.at(0).is<bool>() && truth(c.at(0)) == kWhich;
}
template <int64_t kRest>
Value leaves(const Call& c) {
  return compare(c.work, "==", arithmetic(c.work, '%', c.at(0), int64_t{2}), kRest);
}
bool is_iterable(const Value& v) { return v.text() || v.dict() || v.sequence() || v.is<Undefined>(); }
constexpr Builtin kTests[] = {
    {"!=", "a b", [](const Call& c) -> Value { return compare(c.work, "!=", c.at(0), c.at(1)); }},
    {"<", "a b", [](const Call& c) -> Value { return compare(c.work, "<", c.at(0), c.at(1)); }},
    {"<=", "a b", [](const Call& c) -> Value { return compare(c.work, "<=", c.at(0), c.at(1)); }},
    {"==", "a b", [](const Call& c) -> Value { return compare(c.work, "==", c.at(0), c.at(1)); }},
    {">", "a b", [](const Call& c) -> Value { return compare(c.work, ">", c.at(0), c.at(1)); }},
    {">=", "a b", [](const Call& c) -> Value { return compare(c.work, ">=", c.at(0), c.at(1)); }},
    {"boolean", "value", is_a<bool>},
    {"defined", "value", [](const Call& c) -> Value { return !c.at(0).is<Undefined>(); }},
    {"even", "value", leaves<0>},
    {"false", "value", is_truth<false>},
    {"float", "value", is_a<double>},
    {"in", "value seq", [](const Call& c) -> Value { return compare(c.work, "in", c.at(0), c.at(1)); }},
    {"integer", "value", is_a<int64_t>},
    {"iterable", "value", [](const Call& c) -> Value { return is_iterable(c.at(0)); }},
    {"mapping", "value", is_a<std::shared_ptr<const Dict>>},
    {"none", "value", is_a<None>},
    {"number", "value", [](const Call& c) -> Value { return number(c.at(0)).has_value(); }},
    {"odd", "value", leaves<1>},
    {"sequence", "value",
     [](const Call& c) -> Value {
       const Sequence* const s = c.at(0).sequence();
       return is_iterable(c.at(0)) && !(s && s->form > Form::range);
     }},
    {"string", "value", is_a<Text>},
    {"true", "value", is_truth<true>},
    {"undefined", "value", is_a<Undefined>},
};

// Other spellings of a name.
constexpr std::pair<std::string_view, std::string_view> kAliases[] = {
    {"d", "default"}, {"count", "length"}, {"eq", "=="}, {"equalto", "=="}, {"ne", "!="},         {"lt", "<"},
    {"le", "<="},     {"gt", ">"},         {"ge", ">="}, {"lessthan", "<"}, {"greaterthan", ">"},
};

void require_names(const Call& c) {
  if (!c.given.empty()) throw InputError("`dict` and `namespace` are known of names alone");
}
constexpr Builtin kGlobals[] = {
    {"dict", "*", [](const Call& c) { return require_names(c), dict_of(c.work, c.named); }},
    {"namespace", "*",
     [](const Call& c) {
       require_names(c);
       return c.work.keep({.fields = std::map<std::string, Value>(c.named.begin(), c.named.end())});
     }},
    {"raise_exception", "message",
     [](const Call& c) -> Value { throw InputError("the template refuses this: " + c.text(0)); }},
    {"range", "start stop step",
     [](const Call& c) {
       const int64_t one = c.whole(0, 0), step = c.whole(2, 1);
       const int64_t start = c.has(1) ? one : 0, stop = c.has(1) ? c.whole(1, 0) : one;
       if (step == 0 || !c.has(0)) throw InputError("a range has no beginning, or no steps");
       Values items;
       for (__int128 i = start; step > 0 ? i < stop : i > stop; i += step) {
         if (items.size() == 100000) throw InputError("a range of more than 100000 numbers");
         items.emplace_back(static_cast<int64_t>(i));
       }
       return sequence_of(c.work, std::move(items), Form::range);
     }},
    {"strftime_now", "format",
     [](const Call& c) -> Value {
       if (c.exact(0).size() > 200) throw InputError("a format of a date is longer than 200 bytes");
       const std::time_t now = std::time(nullptr);
       std::tm parts = {};
       localtime_r(&now, &parts);
       char out[20000];
       return std::string(out, std::strftime(out, sizeof(out), c.exact(0).c_str(), &parts));
     }},
};

constexpr Builtin kTextMethods[] = {
    {"capitalize", "s", titled<is_first>},
    {"endswith", "s suffix", [](const Call& c) -> Value { return c.exact(0).ends_with(c.exact(1)); }},
    {"join", "s items",
     [](const Call& c) -> Value {
       const Values items = items_of(c.work, c.at(1));
       return joined(c.work, c.exact(0), items, [&](const Value& v) { return Call{c.work, {v}}.exact(0); });
     }},
    {"lower", "s", [](const Call& c) -> Value { return lower(c.text(0)); }},
    {"lstrip", "s chars", strip<true, false>},
    {"replace", "s old new count",
     [](const Call& c) -> Value { return replaced(c.work, c.exact(0), c.exact(1), c.exact(2), c.whole(3, -1)); }},
    {"rstrip", "s chars", strip<false, true>},
    {"split", "s sep maxsplit", split},
    {"splitlines", "s", [](const Call& c) { return sequence_of(c.work, lines_of(c.text(0))); }},
    {"startswith", "s prefix", [](const Call& c) -> Value { return c.exact(0).starts_with(c.exact(1)); }},
    {"strip", "s chars", strip<true, true>},
    {"title", "s", titled<is_no_letter>},
    {"upper", "s", upper},
};
constexpr Builtin kDictMethods[] = {
    {"get", "dict key default",
     [](const Call& c) -> Value {
       const Value* const found = find(c.work, *c.at(0).dict(), key_of(c.at(1)));
       return found ? *found : c.given.size() > 2 ? c.at(2) : None{};
     }},
    {"items", "dict", pairs<Form::view>},
    {"keys", "dict", [](const Call& c) { return sequence_of(c.work, items_of(c.work, c.at(0)), Form::view); }},
    {"values", "dict",
     [](const Call& c) {
       Values out;
       for (const auto& [key, value] : c.at(0).dict()->items) out.push_back(value);
       return sequence_of(c.work, std::move(out), Form::view);
     }},
};

}  // namespace

const Builtin* find_builtin(Group group, std::string_view name) {
  static constexpr std::array<std::span<const Builtin>, 5> kAll = {kFilters, kTests, kGlobals, kTextMethods,
                                                                   kDictMethods};
  for (const auto& [alias, meant] : kAliases)
    if (group <= Group::tests && name == alias) name = meant;
  for (const Builtin& b : kAll[static_cast<size_t>(group)])
    if (b.name == name) return &b;
  return nullptr;
}

const Builtin* find_method(const Value& of, const Value& key) {
  if (!key.text() || !(of.text() || of.dict())) return nullptr;
  return find_builtin(of.text() ? Group::text : Group::dict, *key.text());
}

Value apply(const Builtin& builtin, Call c) {
  c.work.charge(32);
  for (const Value& v : c.given)
    if (v.text()) c.work.charge(v.text()->size());
  if (c.at(0).marked && find_builtin(Group::tests, builtin.name) != &builtin &&
      std::string_view(" safe string length tojson default ").find(builtin.name) == std::string_view::npos)
    throw InputError(fmt::format("'{}' of a text that `safe` marked is not known", builtin.name));
  if (builtin.parameters == "*") return builtin.function(c);
  std::vector<std::string_view> names;
  for (size_t begin = 0, end = 0; end != std::string_view::npos; begin = end + 1) {
    end = builtin.parameters.find(' ', begin);
    names.push_back(builtin.parameters.substr(begin, end - begin));
  }
  for (auto& [name, value] : std::exchange(c.named, {})) {
    const auto found = static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    if (found == names.size() || found < c.given.size())
      throw InputError(fmt::format("'{}' has no argument '{}', or has it twice", builtin.name, name));
    c.given.resize(found + 1);
    c.given[found] = std::move(value);
  }
  if (c.given.size() > names.size()) throw InputError(fmt::format("'{}' is given too many arguments", builtin.name));
  return builtin.function(c);
}

}  // namespace tessera::jinja
