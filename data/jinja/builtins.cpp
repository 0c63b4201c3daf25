// Filters, tests, functions and methods: each is one entry of a table.
#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <ctime>
#include <map>
#include <span>

#include "data/jinja/value.h"

namespace tessera::jinja {
namespace {

using std::u32string_view;

// Arguments that may be missing.
const Value& at(const Arguments& a, size_t i) {
  static const Value kNone;
  return i < a.given.size() ? a.given[i] : kNone;
}
bool has(const Arguments& a, size_t i) { return !at(a, i).is<Undefined>() && !at(a, i).is<None>(); }
std::string text(Work& work, const Arguments& a, size_t i) { return printed(work, at(a, i)); }
int64_t whole_of(const Arguments& a, size_t i, int64_t otherwise) {
  if (!has(a, i)) return otherwise;
  const auto value = integer(at(a, i));
  if (!value) throw InputError(fmt::format("{} stands where an integer must", type_name(at(a, i))));
  return *value;
}
const std::string& exact_text(const Arguments& a, size_t i) {
  if (!at(a, i).text()) throw InputError(fmt::format("{} stands where a text must", type_name(at(a, i))));
  return *at(a, i).text();
}

// The characters that strip() takes off; none: blanks.
const std::string* characters_of(const Arguments& a) {
  return a.given.size() < 2 || a.given[1].is<None>() ? nullptr : &exact_text(a, 1);
}

Value list_of_texts(Work& work, const std::vector<std::string>& texts) {
  return sequence_of(work, Values(texts.begin(), texts.end()));
}
// From the right it is from the left of everything turned round.
Value split(Work& work, const Arguments& a, bool from_right) {
  std::u32string s = code_points(exact_text(a, 0)), by = has(a, 1) ? code_points(exact_text(a, 1)) : U"";
  if (has(a, 1) && by.empty()) throw InputError("a text is split by nothing");
  work.charge(64 + 64 * s.size());
  const int64_t most = whole_of(a, 2, -1);
  const auto turn = [&](std::u32string& t) {
    if (from_right) std::reverse(t.begin(), t.end());
  };
  turn(s), turn(by);
  std::vector<std::u32string> parts;
  size_t begin = 0;
  for (;;) {
    while (by.empty() && begin < s.size() && is_space(s[begin])) ++begin;
    if (most >= 0 && std::ssize(parts) >= most) break;
    const auto from = s.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto end =
        by.empty() ? std::find_if(from, s.end(), is_space) : std::search(from, s.end(), by.begin(), by.end());
    if (end == s.end()) break;
    parts.emplace_back(from, end);
    begin = static_cast<size_t>(end - s.begin()) + std::max<size_t>(by.size(), 1);
  }
  if (!by.empty() || begin < s.size()) parts.push_back(s.substr(begin));
  if (from_right) std::reverse(parts.begin(), parts.end());
  std::vector<std::string> out;
  for (std::u32string& part : parts) turn(part), out.push_back(utf8(part));
  return list_of_texts(work, out);
}

std::vector<std::string> parts_of(std::string_view text, char between) {
  std::vector<std::string> out;
  for (;;) {
    const size_t end = text.find(between);
    out.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) return out;
    text.remove_prefix(end + 1);
  }
}
// The value at a path of keys, "a.b.0".
Value at_path(Work& work, Value v, const Value& path) {
  if (!path.text()) return path.is<Undefined>() || path.is<None>() ? v : item(work, v, path).value_or(Undefined{});
  for (const std::string& part : parts_of(*path.text(), '.')) {
    const bool counts = !part.empty() && part.find_first_not_of("0123456789") == std::string::npos && part.size() < 18;
    v = item(work, v, counts ? Value(int64_t{std::stoll(part)}) : Value(part)).value_or(Undefined{});
  }
  return v;
}
// What values are sorted by: letters' cases count only where it is asked.
Value key_of(Work& work, const Value& v, const Value& path, bool exact) {
  Value key = at_path(work, v, path);
  return key.text() && !exact ? Value(lower(*key.text())) : key;
}
template <class Key>
void sort(Work& work, Values& items, bool descending, const Key& key) {
  std::vector<std::pair<Value, Value>> keyed;
  for (Value& v : items) keyed.emplace_back(key(v), v);
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return (descending ? order(work, b.first, a.first) : order(work, a.first, b.first)) < 0;
  });
  for (size_t i = 0; i < items.size(); ++i) items[i] = std::move(keyed[i].second);
}
Value pairs(Work& work, const Value& v, Form form) {
  if (!v.dict() && !v.is<Undefined>()) throw InputError(fmt::format("{} stands where a mapping must", type_name(v)));
  Values out;
  if (v.dict())
    for (const auto& [key, value] : v.dict()->items) out.push_back(sequence_of(work, {key, value}, Form::tuple));
  return sequence_of(work, std::move(out), form);
}

int64_t length(const Value& v) {
  if (v.is<Undefined>()) return 0;
  if (v.text()) return std::count_if(v.text()->begin(), v.text()->end(), [](char c) { return (c & 0xC0) != 0x80; });
  if (v.dict()) return std::ssize(v.dict()->items);
  if (!v.sequence() || v.sequence()->form == Form::iterator)
    throw InputError(fmt::format("{} has no length", type_name(v)));
  return std::ssize(v.sequence()->items);
}

// The number that a text says, with blanks around it.
template <class T>
std::optional<T> said(const Value& v) {
  const std::string_view s = stripped(*v.text(), true, true);
  const bool plus = s.starts_with('+') && !s.starts_with("+-");
  T out = 0;
  const auto [end, error] = std::from_chars(s.data() + (plus ? 1 : 0), s.data() + s.size(), out);
  return error == std::errc() && end == s.data() + s.size() ? std::optional(out) : std::nullopt;
}
Value to_integer(const Value& v, const Value& otherwise) {
  if (const auto exact = v.text() ? said<int64_t>(v) : integer(v)) return *exact;
  const auto real = v.text() ? said<double>(v) : number(v);
  if (!real || !std::isfinite(*real)) return otherwise;
  if (std::fabs(*real) > 9.2e18) throw InputError("an integer is beyond 64 bits");
  return static_cast<int64_t>(*real);
}

// A test by its name, as `select` is given it; without one, whether the value is true.
bool passes(Work& work, const Value& v, const Arguments& a, size_t name) {
  if (a.given.size() <= name) return truth(v);
  const Builtin* const test = find_builtin(Group::tests, exact_text(a, name));
  if (!test) throw InputError(fmt::format("the test '{}' is not known", exact_text(a, name)));
  Arguments to{{v}, a.named};
  to.given.insert(to.given.end(), a.given.begin() + static_cast<std::ptrdiff_t>(name) + 1, a.given.end());
  return truth(apply(work, *test, std::move(to)));
}
// What is false has no items here, be it a number.
Values items_if_true(Work& work, const Value& v) { return truth(v) ? items_of(work, v) : Values(); }
Value selected(Work& work, const Arguments& a, bool by_attribute, bool wanted) {
  if (by_attribute && a.given.size() < 2) throw InputError("an attribute is missing");
  Values out;
  for (const Value& v : items_if_true(work, at(a, 0)))
    if (passes(work, by_attribute ? at_path(work, v, at(a, 1)) : v, a, by_attribute ? 2 : 1) == wanted)
      out.push_back(v);
  return sequence_of(work, std::move(out), Form::iterator);
}
Value mapped(Work& work, const Arguments& a) {
  Values out = items_if_true(work, at(a, 0));
  const auto named = [&](std::string_view name) -> const Value* {
    for (const auto& [key, value] : a.named)
      if (key == name) return &value;
    return nullptr;
  };
  const Value *const path = named("attribute"), *const otherwise = named("default");
  if (!path && a.given.size() < 2) throw InputError("`map` needs a filter or an attribute");
  const Builtin* const filter = path ? nullptr : find_builtin(Group::filters, exact_text(a, 1));
  if (!path && !filter) throw InputError(fmt::format("the filter '{}' is not known", exact_text(a, 1)));
  for (Value& v : out) {
    if (path) {
      v = at_path(work, v, *path);
      if (v.is<Undefined>() && otherwise) v = *otherwise;
    } else {
      Arguments to{{v}, a.named};
      to.given.insert(to.given.end(), a.given.begin() + 2, a.given.end());
      v = apply(work, *filter, std::move(to));
    }
  }
  return sequence_of(work, std::move(out), Form::iterator);
}

class Namespace final : public Object {
 public:
  Value attribute(const std::string& name) override {
    const auto found = values_.find(name);
    return found == values_.end() ? Value(Undefined{std::make_shared<const std::string>(name)}) : found->second;
  }
  void set_attribute(const std::string& name, Value value) override { values_[name] = std::move(value); }

 private:
  std::map<std::string, Value> values_;
};

using Args = Arguments&;

constexpr Builtin kFilters[] = {
    {"abs", "value",
     [](Work& w, Args a) {
       const Value& v = at(a, 0);
       const Value nothing = v.is<double>() ? Value(-0.0) : Value(int64_t{0});
       return number(v).value_or(0) < 0 || !number(v) ? arithmetic(w, '-', nothing, v) : arithmetic(w, '+', nothing, v);
     }},
    {"batch", "value linecount fill_with",
     [](Work& w, Args a) {
       Values out, row;
       const auto size = static_cast<size_t>(std::max<int64_t>(whole_of(a, 1, 0), 0));
       for (const Value& v : items_of(w, at(a, 0))) {
         if (row.size() == size) out.push_back(sequence_of(w, std::exchange(row, {})));
         row.push_back(v);
       }
       if (!row.empty()) {
         if (has(a, 2) && row.size() < size) w.charge(32 * size), row.resize(size, at(a, 2));
         out.push_back(sequence_of(w, std::move(row)));
       }
       return sequence_of(w, std::move(out), Form::iterator);
     }},
    {"capitalize", "s",
     [](Work& w, Args a) -> Value { return titled(text(w, a, 0), [](char32_t before) { return before == 0; }); }},
    {"count", "value", [](Work&, Args a) -> Value { return length(at(a, 0)); }},
    {"d", "value default_value boolean",
     [](Work&, Args a) -> Value {
       const bool missing = at(a, 0).is<Undefined>() || (truth(at(a, 2)) && !truth(at(a, 0)));
       return !missing ? at(a, 0) : a.given.size() > 1 ? at(a, 1) : Value(std::string());
     }},
    {"dictsort", "value case_sensitive by reverse",
     [](Work& w, Args a) {
       const Value all = pairs(w, at(a, 0), Form::list);
       if (!at(a, 0).dict()) throw InputError("what is undefined is not sorted");
       const std::string by = has(a, 2) ? text(w, a, 2) : "key";
       if (by != "key" && by != "value") throw InputError("a mapping is sorted by key or value");
       Values out = all.sequence()->items;
       sort(w, out, truth(at(a, 3)),
            [&](const Value& v) { return key_of(w, v, int64_t{by == "key" ? 0 : 1}, truth(at(a, 1))); });
       return sequence_of(w, std::move(out));
     }},
    {"first", "seq",
     [](Work& w, Args a) -> Value {
       Values items = items_of(w, at(a, 0));
       if (items.empty()) return Undefined{};
       Value out = items.front();
       if (const auto* const s = at(a, 0).as<std::shared_ptr<Sequence>>(); s && (*s)->form == Form::iterator) {
         items.erase(items.begin());
         (*s)->items = std::move(items);
       }
       return out;
     }},
    {"float", "value default",
     [](Work&, Args a) -> Value {
       const Value& v = at(a, 0);
       if (v.is<Undefined>()) throw InputError("what is undefined is no number");
       const auto found = v.text() ? said<double>(v) : number(v);
       return found ? Value(*found) : a.given.size() > 1 ? at(a, 1) : Value(0.0);
     }},
    {"format", "*",
     [](Work& w, Args a) {
       if (!a.named.empty()) throw InputError("the names of a format are not known");
       Values values(a.given.begin() + 1, a.given.end());
       return arithmetic(w, '%', text(w, a, 0), sequence_of(w, std::move(values), Form::tuple));
     }},
    {"indent", "s width first blank",
     [](Work& w, Args a) -> Value {
       const std::string by = at(a, 1).text() ? text(w, a, 1) : std::string();
       const int64_t width = at(a, 1).text() ? 0 : whole_of(a, 1, 4);
       w.charge(static_cast<size_t>(std::max<int64_t>(width, 0)));
       const std::string indent = by + std::string(static_cast<size_t>(std::max<int64_t>(width, 0)), ' ');
       std::string out = truth(at(a, 2)) ? indent : "";
       bool begins = true;
       for (const std::string& line : lines_of(exact_text(a, 0) + "\n")) {
         w.charge(indent.size());
         if (!begins) out += !line.empty() || truth(at(a, 3)) ? "\n" + indent : "\n";
         out += line;
         begins = false;
       }
       return out;
     }},
    {"int", "value default base",
     [](Work&, Args a) -> Value {
       if (at(a, 0).is<Undefined>()) throw InputError("what is undefined is no number");
       if (whole_of(a, 2, 10) != 10) throw InputError("only the base 10 is known");
       return to_integer(at(a, 0), a.given.size() > 1 ? at(a, 1) : Value(int64_t{0}));
     }},
    {"items", "value", [](Work& w, Args a) { return pairs(w, at(a, 0), Form::iterator); }},
    {"join", "value d attribute",
     [](Work& w, Args a) -> Value {
       const std::string between = text(w, a, 1);
       std::string out;
       bool begins = true;
       for (const Value& v : items_of(w, at(a, 0))) {
         w.charge(between.size());
         if (!std::exchange(begins, false)) out += between;
         out += printed(w, has(a, 2) ? at_path(w, v, at(a, 2)) : v);
       }
       return out;
     }},
    {"last", "seq",
     [](Work& w, Args a) -> Value {
       length(at(a, 0));
       const Values items = items_of(w, at(a, 0));
       return items.empty() ? Undefined{} : items.back();
     }},
    {"list", "value", [](Work& w, Args a) { return sequence_of(w, items_of(w, at(a, 0))); }},
    {"lower", "s", [](Work& w, Args a) -> Value { return lower(text(w, a, 0)); }},
    {"map", "*", [](Work& w, Args a) { return mapped(w, a); }},
    {"reject", "*", [](Work& w, Args a) { return selected(w, a, false, false); }},
    {"rejectattr", "*", [](Work& w, Args a) { return selected(w, a, true, false); }},
    {"replace", "s old new count",
     [](Work& w, Args a) -> Value {
       if (a.given.size() < 3) throw InputError("`replace` needs two texts");
       return replaced(w, text(w, a, 0), text(w, a, 1), text(w, a, 2), whole_of(a, 3, -1));
     }},
    {"reverse", "value",
     [](Work& w, Args a) -> Value {
       if (at(a, 0).text()) {
         std::u32string points = code_points(*at(a, 0).text());
         std::reverse(points.begin(), points.end());
         return utf8(points);
       }
       const bool read = at(a, 0).sequence() && at(a, 0).sequence()->form == Form::iterator;
       Values items = items_of(w, at(a, 0));
       std::reverse(items.begin(), items.end());
       return sequence_of(w, std::move(items), read ? Form::list : Form::iterator);
     }},
    {"round", "value precision method",
     [](Work& w, Args a) -> Value {
       const auto v = number(at(a, 0));
       const int64_t digits = whole_of(a, 1, 0);
       const std::string method = has(a, 2) ? text(w, a, 2) : "common";
       if (!v || digits < 0 || digits > 300) throw InputError("a number is rounded to 0 to 300 digits");
       if (method == "common")
         return at(a, 0).is<double>() ? Value(std::strtod(fmt::format("{:.{}f}", *v, digits).c_str(), nullptr))
                                      : Value(*integer(at(a, 0)));
       if (method != "ceil" && method != "floor") throw InputError("a number is rounded by common, ceil or floor");
       const double scale = std::pow(10, digits);
       return (method == "ceil" ? std::ceil(*v * scale) : std::floor(*v * scale)) / scale;
     }},
    {"safe", "value", [](Work& w, Args a) -> Value { return text(w, a, 0); }},
    {"select", "*", [](Work& w, Args a) { return selected(w, a, false, true); }},
    {"selectattr", "*", [](Work& w, Args a) { return selected(w, a, true, true); }},
    {"sort", "value reverse case_sensitive attribute",
     [](Work& w, Args a) {
       Values items = items_of(w, at(a, 0));
       const std::vector<std::string> paths = has(a, 3) ? parts_of(text(w, a, 3), ',') : std::vector<std::string>();
       sort(w, items, truth(at(a, 1)), [&](const Value& v) {
         Values keys;
         for (const std::string& path : paths) keys.push_back(key_of(w, v, path, truth(at(a, 2))));
         if (paths.empty()) keys.push_back(key_of(w, v, Undefined{}, truth(at(a, 2))));
         return sequence_of(w, std::move(keys));  // lists are compared by their first unequal items
       });
       return sequence_of(w, std::move(items));
     }},
    {"string", "s", [](Work& w, Args a) -> Value { return text(w, a, 0); }},
    {"title", "s",
     [](Work& w, Args a) -> Value {
       return titled(text(w, a, 0), [](char32_t before) {
         return before == 0 || is_space(before) || u32string_view(U"-({[<").find(before) != u32string_view::npos;
       });
     }},
    {"tojson", "value ensure_ascii indent separators sort_keys",
     [](Work& w, Args a) -> Value {
       Style style{.json = true, .ascii = truth(at(a, 1)), .sorted = truth(at(a, 4))};
       if (has(a, 2)) {
         const int64_t width = at(a, 2).text() ? 0 : std::max<int64_t>(whole_of(a, 2, 0), 0);
         w.charge(static_cast<size_t>(width));
         style.indent = at(a, 2).text() ? text(w, a, 2) : std::string(static_cast<size_t>(width), ' ');
         style.comma = ",";
       }
       if (has(a, 3)) {
         const Values two = items_of(w, at(a, 3));
         if (two.size() != 2) throw InputError("JSON has two separators");
         style.comma = printed(w, two[0]), style.colon = printed(w, two[1]);
       }
       return written(w, at(a, 0), style);
     }},
    {"trim", "value chars",
     [](Work& w, Args a) -> Value { return std::string(stripped(text(w, a, 0), true, true, characters_of(a))); }},
    {"unique", "value case_sensitive attribute",
     [](Work& w, Args a) {
       Values out, keys;
       for (const Value& v : items_of(w, at(a, 0))) {
         const Value key = key_of(w, v, at(a, 2), truth(at(a, 1)));
         dict_of(w, {{key, None{}}});  // throws for what Python does not hash
         if (std::any_of(keys.begin(), keys.end(), [&](const Value& k) { return equal(w, k, key); })) continue;
         keys.push_back(key);
         out.push_back(v);
       }
       return sequence_of(w, std::move(out), Form::iterator);
     }},
    {"upper", "s", [](Work& w, Args a) -> Value { return upper(text(w, a, 0)); }},
};

template <class T>
bool is_a(Args a) {
  return at(a, 0).is<T>();
}
template <size_t kRest>
Value leaves(Work& w, Args a) {
  if (!number(at(a, 0))) throw InputError(fmt::format("{} is neither odd nor even", type_name(at(a, 0))));
  return equal(w, arithmetic(w, '%', at(a, 0), int64_t{2}), static_cast<int64_t>(kRest));
}
bool iterates(const Value& v) { return v.text() || v.dict() || v.sequence() || v.is<Undefined>(); }

constexpr Builtin kTests[] = {
    {"boolean", "value", [](Work&, Args a) -> Value { return is_a<bool>(a); }},
    {"callable", "value", [](Work&, Args a) -> Value { return is_a<Object*>(a) || is_a<Undefined>(a); }},
    {"defined", "value", [](Work&, Args a) -> Value { return !is_a<Undefined>(a); }},
    {"divisibleby", "value num",
     [](Work& w, Args a) -> Value { return equal(w, arithmetic(w, '%', at(a, 0), at(a, 1)), int64_t{0}); }},
    {"eq", "a b", [](Work& w, Args a) -> Value { return compare(w, "==", at(a, 0), at(a, 1)); }},
    {"even", "value", leaves<0>},
    {"false", "value", [](Work&, Args a) -> Value { return is_a<bool>(a) && !truth(at(a, 0)); }},
    {"float", "value", [](Work&, Args a) -> Value { return is_a<double>(a); }},
    {"ge", "a b", [](Work& w, Args a) -> Value { return compare(w, ">=", at(a, 0), at(a, 1)); }},
    {"gt", "a b", [](Work& w, Args a) -> Value { return compare(w, ">", at(a, 0), at(a, 1)); }},
    {"in", "value seq", [](Work& w, Args a) -> Value { return contains(w, at(a, 1), at(a, 0)); }},
    {"integer", "value", [](Work&, Args a) -> Value { return is_a<int64_t>(a); }},
    {"iterable", "value", [](Work&, Args a) -> Value { return iterates(at(a, 0)); }},
    {"le", "a b", [](Work& w, Args a) -> Value { return compare(w, "<=", at(a, 0), at(a, 1)); }},
    {"lt", "a b", [](Work& w, Args a) -> Value { return compare(w, "<", at(a, 0), at(a, 1)); }},
    {"mapping", "value", [](Work&, Args a) -> Value { return at(a, 0).dict() != nullptr; }},
    {"ne", "a b", [](Work& w, Args a) -> Value { return compare(w, "!=", at(a, 0), at(a, 1)); }},
    {"none", "value", [](Work&, Args a) -> Value { return is_a<None>(a); }},
    {"number", "value", [](Work&, Args a) -> Value { return number(at(a, 0)).has_value(); }},
    {"odd", "value", leaves<1>},
    {"sequence", "value",
     [](Work&, Args a) -> Value {
       const Sequence* const s = at(a, 0).sequence();
       return s ? s->form <= Form::range : iterates(at(a, 0));
     }},
    {"string", "value", [](Work&, Args a) -> Value { return is_a<Text>(a); }},
    {"true", "value", [](Work&, Args a) -> Value { return is_a<bool>(a) && truth(at(a, 0)); }},
    {"undefined", "value", [](Work&, Args a) -> Value { return is_a<Undefined>(a); }},
};

// Other spellings of a name.
constexpr std::pair<std::string_view, std::string_view> kAliases[] = {
    {"default", "d"}, {"length", "count"}, {"equalto", "eq"}, {"==", "eq"},       {"!=", "ne"},         {"<", "lt"},
    {"<=", "le"},     {">", "gt"},         {">=", "ge"},      {"lessthan", "lt"}, {"greaterthan", "gt"}};

constexpr Builtin kGlobals[] = {
    {"dict", "*",
     [](Work& w, Args a) {
       Pairs items;
       if (!a.given.empty()) {
         if (!at(a, 0).dict() || a.given.size() > 1) throw InputError("`dict` is known of one mapping and of names");
         items = at(a, 0).dict()->items;
       }
       for (const auto& [name, value] : a.named) items.emplace_back(name, value);
       return dict_of(w, std::move(items));
     }},
    {"namespace", "*",
     [](Work& w, Args a) -> Value {
       auto made = std::make_unique<Namespace>();
       if (!a.given.empty()) {
         if (!at(a, 0).dict() || a.given.size() > 1)
           throw InputError("`namespace` is known of one mapping and of names");
         for (const auto& [key, value] : at(a, 0).dict()->items) made->set_attribute(printed(w, key), value);
       }
       for (const auto& [name, value] : a.named) made->set_attribute(name, value);
       return w.keep(std::move(made));
     }},
    {"raise_exception", "message",
     [](Work& w, Args a) -> Value { throw InputError(fmt::format("the template refuses this: {}", text(w, a, 0))); }},
    {"range", "start stop step",
     [](Work& w, Args a) {
       const int64_t one = whole_of(a, 0, 0), step = whole_of(a, 2, 1);
       const int64_t start = has(a, 1) ? one : 0, stop = has(a, 1) ? whole_of(a, 1, 0) : one;
       if (step == 0 || !has(a, 0)) throw InputError("a range has no beginning, or no steps");
       Values items;
       for (__int128 i = start; step > 0 ? i < stop : i > stop; i += step) {
         if (items.size() == 100000) throw InputError("a range of more than 100000 numbers");
         items.emplace_back(static_cast<int64_t>(i));
       }
       return sequence_of(w, std::move(items), Form::range);
     }},
    {"strftime_now", "format",
     [](Work&, Args a) -> Value {
       const std::string& format = exact_text(a, 0);
       if (format.size() > 200) throw InputError("a format of a date is longer than 200 bytes");
       const std::time_t now = std::time(nullptr);
       std::tm parts = {};
       localtime_r(&now, &parts);
       char out[20000];
       return std::string(out, std::strftime(out, sizeof(out), format.c_str(), &parts));
     }},
};

// A text's begin or end, or one of several, in the part that two more arguments may give.
Value borders(Args a, bool at_end) {
  if (a.given.size() > 2) throw InputError("a part of a text is not known here");
  const Values any =
      at(a, 1).sequence() && at(a, 1).sequence()->form == Form::tuple ? at(a, 1).sequence()->items : Values{at(a, 1)};
  return std::any_of(any.begin(), any.end(), [&](const Value& v) {
    const Arguments one{{v}};
    return at_end ? exact_text(a, 0).ends_with(exact_text(one, 0)) : exact_text(a, 0).starts_with(exact_text(one, 0));
  });
}
template <bool kLeft, bool kRight>
Value strip(Work&, Args a) {
  return std::string(stripped(exact_text(a, 0), kLeft, kRight, characters_of(a)));
}
Value position(Args a, size_t found) {
  if (a.given.size() > 2) throw InputError("a part of a text is not known here");
  return found == std::string::npos ? -1 : length(Value(exact_text(a, 0).substr(0, found)));
}

constexpr Builtin kTextMethods[] = {
    {"count", "s sub",
     [](Work&, Args a) -> Value {
       const std::string &s = exact_text(a, 0), &sub = exact_text(a, 1);
       if (sub.empty()) return length(at(a, 0)) + 1;
       int64_t n = 0;
       for (size_t i = s.find(sub); i != std::string::npos; i = s.find(sub, i + sub.size())) ++n;
       return n;
     }},
    {"endswith", "s suffix", [](Work&, Args a) { return borders(a, true); }},
    {"find", "s sub start", [](Work&, Args a) { return position(a, exact_text(a, 0).find(exact_text(a, 1))); }},
    {"join", "s items",
     [](Work& w, Args a) -> Value {
       std::string out;
       bool begins = true;
       for (const Value& v : items_of(w, at(a, 1))) {
         if (!std::exchange(begins, false)) out += exact_text(a, 0);
         out += exact_text({{v}}, 0);
         w.charge(exact_text(a, 0).size() + v.text()->size());
       }
       return out;
     }},
    {"lstrip", "s chars", strip<true, false>},
    {"replace", "s old new count",
     [](Work& w, Args a) -> Value {
       return replaced(w, exact_text(a, 0), exact_text(a, 1), exact_text(a, 2), whole_of(a, 3, -1));
     }},
    {"rsplit", "s sep maxsplit", [](Work& w, Args a) { return split(w, a, true); }},
    {"rstrip", "s chars", strip<false, true>},
    {"split", "s sep maxsplit", [](Work& w, Args a) { return split(w, a, false); }},
    {"splitlines", "s", [](Work& w, Args a) { return list_of_texts(w, lines_of(exact_text(a, 0))); }},
    {"startswith", "s prefix", [](Work&, Args a) { return borders(a, false); }},
    {"strip", "s chars", strip<true, true>},
    {"title", "s",
     [](Work&, Args a) -> Value {
       return titled(exact_text(a, 0), [](char32_t before) { return !is_letter(before); });
     }},
};
constexpr Builtin kDictMethods[] = {
    {"get", "dict key default",
     [](Work& w, Args a) -> Value {
       dict_of(w, {{at(a, 1), None{}}});  // throws for what Python does not hash
       const Value* const found = find(w, *at(a, 0).dict(), at(a, 1));
       return found ? *found : a.given.size() > 2 ? at(a, 2) : None{};
     }},
    {"items", "dict", [](Work& w, Args a) { return pairs(w, at(a, 0), Form::view); }},
    {"keys", "dict", [](Work& w, Args a) { return sequence_of(w, items_of(w, at(a, 0)), Form::view); }},
    {"values", "dict",
     [](Work& w, Args a) {
       Values out;
       for (const auto& [key, value] : at(a, 0).dict()->items) out.push_back(value);
       return sequence_of(w, std::move(out), Form::view);
     }},
};
}  // namespace

const Builtin* find_builtin(Group group, std::string_view name) {
  static constexpr std::array<std::span<const Builtin>, 6> kAll = {kFilters,     kTests,       kGlobals,
                                                                   kTextMethods, kDictMethods, {}};
  if (group == Group::text && (name == "upper" || name == "lower" || name == "capitalize")) group = Group::filters;
  if (group <= Group::tests)
    for (const auto& [alias, meant] : kAliases)
      if (name == alias) name = meant;
  for (const Builtin& b : kAll[static_cast<size_t>(group)])
    if (b.name == name) return &b;
  return nullptr;
}

Value apply(Work& work, const Builtin& builtin, Arguments a) {
  work.charge(32);
  for (const Value& v : a.given)
    if (v.text()) work.charge(v.text()->size());
  if (builtin.parameters != "*") {
    std::vector<std::string_view> names;
    for (std::string_view rest = builtin.parameters; !rest.empty();) {
      names.push_back(rest.substr(0, rest.find(' ')));
      rest.remove_prefix(std::min(names.back().size() + 1, rest.size()));
    }
    for (auto& [name, value] : a.named) {
      const auto found = static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
      if (found == names.size() || found < a.given.size())
        throw InputError(fmt::format("'{}' has no argument '{}', or has it twice", builtin.name, name));
      a.given.resize(found + 1);
      a.given[found] = std::move(value);
    }
    if (a.given.size() > names.size()) throw InputError(fmt::format("'{}' is given too many arguments", builtin.name));
  }
  return builtin.function(work, a);
}

}  // namespace tessera::jinja
