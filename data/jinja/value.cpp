// Python's semantics of values.
#include "data/jinja/value.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bad_input.h"
#include "base/utf8.h"

namespace tessera::jinja {

std::u32string code_points(std::string_view text) {
  std::u32string out;
  for (size_t at = 0; at < text.size();) {
    const auto c = next_code_point(text, at);
    if (!c) throw InputError("a string is not UTF-8");
    out += *c;
  }
  return out;
}

std::string utf8(std::u32string_view points) {
  std::string out;
  for (const char32_t c : points) append_utf8(out, c);
  return out;
}

bool is_space(char32_t c) { return is_white_space(c) || (c >= 28 && c <= 31); }

std::string unescaped(std::string_view text) {
  constexpr std::string_view kNames = "\\'\"abfnrtv", kMeant = "\\'\"\a\b\f\n\r\t\v";
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i] == '\\' ? text[++i] : '\0';
    const size_t found = kNames.find(c), digits = c == 'x' ? 2 : c == 'u' ? 4 : 0;
    if (c == '\0') {
      out += text[i];
    } else if (found != std::string_view::npos) {
      out += kMeant[found];
    } else if (digits > 0) {
      uint32_t point = 0;
      const std::string_view hex = text.substr(i + 1, digits);
      const auto [end, error] = std::from_chars(hex.begin(), hex.end(), point, 16);
      if (hex.size() != digits || end != hex.end() || (point >= 0xD800 && point < 0xE000))
        bad_input("the escape \\{} is incomplete or not a character", c);
      append_utf8(out, point);
      i += digits;
    } else if (c == 'N' || c == 'U' || (c >= '0' && c <= '7')) {
      bad_input("the escape \\{} is not supported", c);
    } else if (c != '\n') {
      (out += '\\') += c;
    }
  }
  return out;
}

std::string_view stripped(std::string_view text, bool left, bool right, const std::string* characters) {
  if (!characters) return tessera::stripped(text, left, right, is_space);
  return tessera::stripped(
      text, left, right, [all = code_points(*characters)](char32_t c) { return all.find(c) != std::u32string::npos; });
}

namespace {

constexpr int kDeepest = 100;

int parse_level(int below) {
  if (below >= kDeepest) bad_input("values are nested deeper than {}", kDeepest);
  return below + 1;
}
int nesting_depth(const Value& v) { return v.sequence() ? v.sequence()->depth : v.dict() ? v.dict()->depth : 0; }
bool is_listed(const Value& v) { return v.sequence() && v.sequence()->form <= Form::tuple; }
bool is_indexed(const Value& v) { return v.text() || (v.sequence() && v.sequence()->form <= Form::range); }

[[noreturn]] void reject_operands(std::string_view operation, const Value& a, const Value& b) {
  bad_input("{} of {} and {} is not supported", operation, type_name(a), type_name(b));
}
// Python's Markup escapes strings concatenated with it.
void require_plain(const Value& v) {
  if (v.marked) throw InputError("a string marked as `safe` may only be printed or joined with ~");
}

// As in Python: double quotes only if the string contains single quotes and no double quotes.
std::string quoted(const std::string& text) {
  const char quote = text.find('\'') != std::string::npos && text.find('"') == std::string::npos ? '"' : '\'';
  std::string out(1, quote);
  for (const char32_t c : code_points(text)) {
    const auto n = static_cast<uint32_t>(c);
    const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
    if (const size_t found = std::u32string_view(U"\\\n\r\t").find(c); found != std::u32string_view::npos)
      (out += '\\') += "\\nrt"[found];
    else if (n == static_cast<unsigned char>(quote))
      (out += '\\') += quote;
    else if (c == ' ' || (category != UTF8PROC_CATEGORY_CN && category < UTF8PROC_CATEGORY_ZS))
      append_utf8(out, c);
    else
      out += n < 0x100     ? fmt::format("\\x{:02x}", n)
             : n < 0x10000 ? fmt::format("\\u{:04x}", n)
                           : fmt::format("\\U{:08x}", n);
  }
  return out += quote;
}

std::string real_text(double d, bool json) {
  if (json && !std::isfinite(d)) return std::isnan(d) ? "NaN" : d > 0 ? "Infinity" : "-Infinity";
  std::string out = fmt::format("{}", d);
  if (out.find_first_not_of("-0123456789") == std::string::npos) out += ".0";
  return out;
}

void write_text(RenderContext& work, std::string& out, const Value& v, const Style& style, int level = 0) {
  work.charge(32);
  const auto below = [&](const Value& one) { write_text(work, out, one, style, level + 1); };
  const auto all = [&](char open, const auto& items, std::string_view close, const auto& one) {
    const auto line = [&](int levels) {
      if (!style.indent || items.empty()) return;
      work.charge(style.indent->size() * static_cast<size_t>(levels));
      out += '\n';
      for (int i = 0; i < levels; ++i) out += *style.indent;
    };
    out += open;
    for (const auto& each : items) {
      if (&each != items.data()) out += style.comma;
      line(level + 1);
      one(each);
    }
    line(level);
    out += close;
  };
  if (const std::string* const text = v.text()) {
    if (!style.json) require_plain(v);
    work.charge(text->size());
    out += style.json ? nlohmann::json(*text).dump(-1, ' ', style.ascii) : quoted(*text);
  } else if (v.is<None>()) {
    out += style.json ? "null" : "None";
  } else if (const bool* const b = v.as<bool>()) {
    out += style.json ? (*b ? "true" : "false") : (*b ? "True" : "False");
  } else if (const int64_t* const i = v.as<int64_t>()) {
    out += std::to_string(*i);
  } else if (const double* const real = v.as<double>()) {
    out += real_text(*real, style.json);
  } else if (const Dict* const dict = v.dict()) {
    Pairs items = dict->items;
    if (style.sorted) std::ranges::sort(items, {}, &Pairs::value_type::first);
    all('{', items, "}", [&](const auto& pair) {
      below(Value(pair.first));
      out += style.colon;
      below(pair.second);
    });
  } else if (is_listed(v)) {
    const Sequence& s = *v.sequence();
    const bool tuple = s.form == Form::tuple && !style.json;
    all(tuple ? '(' : '[', s.items, tuple && s.items.size() == 1 ? ",)" : tuple ? ")" : "]", below);
  } else if (v.is<Undefined>() && !style.json) {
    out += "Undefined";
  } else {
    bad_input("{} cannot be printed; expected a string, or |list after it", type_name(v));
  }
}

int64_t of_integers(std::string_view op, __int128 a, __int128 b) {
  __int128 out = op == "+" ? a + b : op == "-" ? a - b : a * b;
  if (op == "//" || op == "%") {
    const __int128 below = a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
    out = op == "//" ? below : a - below * b;
  }
  if (out < INT64_MIN || out > INT64_MAX) throw InputError("an integer does not fit in 64 bits");
  return static_cast<int64_t>(out);
}

std::string repeated(RenderContext& work, const std::string& text, int64_t times) {
  const size_t n = times < 0 || text.empty() ? 0 : static_cast<size_t>(times);
  work.charge(n > (size_t{1} << 40) / std::max<size_t>(text.size(), 1) ? SIZE_MAX : text.size() * n);
  std::string out;
  for (size_t i = 0; i < n; ++i) out += text;
  return out;
}

bool equal(RenderContext& work, const Value& a, const Value& b) {
  work.charge(16);
  if (integer(a) && integer(b)) return *integer(a) == *integer(b);
  if (number(a) && number(b)) return *number(a) == *number(b);
  if (a.index() != b.index()) return false;
  if (a.text()) return *a.text() == *b.text();
  if (const Dict* const x = a.dict(), * const y = b.dict(); x) {
    return x->items.size() == y->items.size() && std::all_of(x->items.begin(), x->items.end(), [&](const auto& pair) {
             const Value* const other = find_item(work, *y, pair.first);
             return other && equal(work, pair.second, *other);
           });
  }
  if (const Sequence* const x = a.sequence(), * const y = b.sequence(); x) {
    if (x->form != y->form || x->form > Form::range) return x == y;
    return std::equal(x->items.begin(), x->items.end(), y->items.begin(), y->items.end(),
                      [&](const Value& one, const Value& other) { return equal(work, one, other); });
  }
  return a.object() == b.object();
}

std::partial_ordering order(RenderContext& work, const Value& a, const Value& b) {
  work.charge(16);
  if (integer(a) && integer(b)) return *integer(a) <=> *integer(b);
  if (number(a) && number(b)) return *number(a) <=> *number(b);
  if (a.text() && b.text()) return a.text()->compare(*b.text()) <=> 0;
  bad_input("{} and {} cannot be ordered", type_name(a), type_name(b));
}

bool contains(RenderContext& work, const Value& container, const Value& v) {
  if (const std::string* const text = container.text()) {
    if (!v.text()) reject_operands("`in`", v, container);
    work.charge(text->size());
    return text->find(*v.text()) != std::string::npos;
  }
  if (container.dict() && !v.text()) reject_operands("`in`", v, container);
  if (container.dict()) return find_item(work, *container.dict(), *v.text()) != nullptr;
  const Values items = to_items(work, container);
  return std::any_of(items.begin(), items.end(), [&](const Value& one) { return equal(work, one, v); });
}

}  // namespace

Value make_sequence(RenderContext& work, Values items, Form form) {
  work.charge(64 + 32 * items.size());
  int below = 0;
  for (const Value& v : items) below = std::max(below, nesting_depth(v));
  return std::make_shared<Sequence>(Sequence{std::move(items), form, parse_level(below)});
}

Value make_dict(RenderContext& work, const Pairs& items) {
  Dict out;
  int below = 0;
  for (const auto& [key, value] : items) {
    below = std::max(below, nesting_depth(value));
    if (const Value* const found = find_item(work, out, key))
      const_cast<Value&>(*found) = value;
    else
      out.items.emplace_back(key, value);
  }
  work.charge(64 + 64 * out.items.size());
  out.depth = parse_level(below);
  return std::make_shared<const Dict>(std::move(out));
}

std::string_view type_name(const Value& v) {
  static constexpr std::array<std::string_view, 9> kNames = {
      "an undefined value", "none",   "a boolean", "an integer", "a number",
      "a string",           "a list", "a mapping", "an object"};
  static constexpr std::array<std::string_view, 5> kForms = {"a list", "a tuple", "a range", "a view", "an iterator"};
  return v.sequence() ? kForms[static_cast<size_t>(v.sequence()->form)] : kNames[v.index()];
}

bool truth(const Value& v) {
  if (const auto n = number(v)) return *n != 0;
  if (v.text()) return !v.text()->empty();
  if (v.dict()) return !v.dict()->items.empty();
  if (v.sequence()) return v.sequence()->form == Form::iterator || !v.sequence()->items.empty();
  return v.object() != nullptr;
}

std::optional<int64_t> integer(const Value& v) {
  if (const bool* const b = v.as<bool>()) return *b ? 1 : 0;
  return v.is<int64_t>() ? std::optional(*v.as<int64_t>()) : std::nullopt;
}

std::optional<double> number(const Value& v) {
  if (const auto i = integer(v)) return static_cast<double>(*i);
  return v.is<double>() ? std::optional(*v.as<double>()) : std::nullopt;
}

const Value* find_item(RenderContext& work, const Dict& dict, const std::string& key) {
  work.charge(16 * dict.items.size());
  const auto found = std::ranges::find(dict.items, key, &Pairs::value_type::first);
  return found == dict.items.end() ? nullptr : &found->second;
}

const std::string& to_key(const Value& v) {
  if (!v.text()) bad_input("{} is not supported as a key", type_name(v));
  return *v.text();
}

bool compare(RenderContext& work, std::string_view op, const Value& a, const Value& b) {
  if (op == "==" || op == "!=") return equal(work, a, b) == (op == "==");
  if (op == "in" || op == "not in") return contains(work, b, a) == (op == "in");
  const auto found = order(work, a, b);
  return op == "<" ? found < 0 : op == "<=" ? found <= 0 : op == ">" ? found > 0 : found >= 0;
}

std::string printed(RenderContext& work, const Value& v) {
  if (v.text()) work.charge(v.text()->size());
  return v.text() ? *v.text() : v.is<Undefined>() ? "" : written(work, v, {});
}

std::string written(RenderContext& work, const Value& v, const Style& style) {
  std::string out;
  write_text(work, out, v, style);
  return out;
}

Values to_items(RenderContext& work, const Value& v) {
  if (v.is<Undefined>()) return {};
  Values out;
  if (const std::string* const text = v.text()) {
    work.charge(64 * text->size());
    for (const char32_t c : code_points(*text)) out.emplace_back(utf8({&c, 1}));
  } else if (const Dict* const dict = v.dict()) {
    for (const auto& [key, value] : dict->items) out.emplace_back(key);
  } else if (Sequence* const s = v.sequence()) {
    out = s->form == Form::iterator ? std::exchange(s->items, {}) : s->items;
  } else {
    bad_input("{} is not iterable", type_name(v));
  }
  work.charge(16 * out.size());
  return out;
}

Value item(RenderContext& work, const Value& of, const Value& key) {
  require_plain(of);
  const Undefined missing{key.text() ? *key.as<Text>() : nullptr};
  if (const Undefined* const u = of.as<Undefined>())
    bad_input("{} is undefined", u->name ? "'" + u->name->substr(0, 60) + "'" : "a value");
  if (of.dict()) {
    const Value* const found = key.text() ? find_item(work, *of.dict(), *key.text()) : nullptr;
    return found ? *found : missing;
  }
  const auto index = integer(key);
  if (!index || !is_indexed(of)) return missing;
  const Values characters = of.text() ? to_items(work, of) : Values();
  const Values& items = of.text() ? characters : of.sequence()->items;
  const int64_t at = *index < 0 ? *index + std::ssize(items) : *index;
  return at < 0 || at >= std::ssize(items) ? missing : items[static_cast<size_t>(at)];
}

Value member(RenderContext& work, const Value& of, const Value& key, bool dotted) {
  if (Object* const object = of.object(); object && key.text()) {
    if (object->attribute) return object->attribute(*key.text());
    if (object->fields && object->fields->contains(*key.text())) return object->fields->at(*key.text());
    return Undefined{*key.as<Text>()};
  }
  // After a dot, a method precedes a key; in brackets, a key precedes a method.
  const auto method = find_method(of, key);
  Value found = method && dotted ? Undefined{} : item(work, of, key);
  if (!method || !found.is<Undefined>()) return found;
  return work.store({.call = [b = *method, of](Call c) {
    c.given.insert(c.given.begin(), of);
    return apply(b, std::move(c));
  }});
}

void assign(RenderContext& work, const std::vector<Text>& names, const Value& value) {
  if (names.size() == 1) return static_cast<void>(work.scope->values.insert_or_assign(*names[0], value));
  Values items = to_items(work, value);
  if (items.size() != names.size())
    bad_input("expected as many values as names, got {} values for {} names", items.size(), names.size());
  for (size_t i = 0; i < items.size(); ++i) work.scope->values[*names[i]] = std::move(items[i]);
}

Value named_value(RenderContext& work, const Text& name) {
  for (const Scope* s = work.scope.get(); s; s = s->outer.get())
    if (const auto known = s->values.find(*name); known != s->values.end()) return known->second;
  for (const char* const other : {"cycler", "joiner", "lipsum", "self", "super", "varargs", "kwargs"})
    if (*name == other) bad_input("'{}' is not supported", other);
  const auto found = find_builtin(Group::globals, *name);
  if (!found) return Undefined{name};
  return work.store({.call = [b = *found](const Call& c) { return apply(b, c); }});
}

Value loop_attribute(const Values& items, size_t at, const std::string& name) {
  const auto index = static_cast<int64_t>(at), left = std::ssize(items) - index;
  if (name == "index") return index + 1;
  if (name == "index0") return index;
  if (name == "revindex") return left;
  if (name == "revindex0") return left - 1;
  if (name == "first") return index == 0;
  if (name == "last") return left == 1;
  if (name == "length") return std::ssize(items);
  if (name == "previtem") return index > 0 ? items[at - 1] : Undefined{};
  if (name == "nextitem") return left > 1 ? items[at + 1] : Undefined{};
  bad_input("'loop.{}' is not supported", name);
}

Value slice(RenderContext& work, const Value& of, const Value& from, const Value& to, const Value& step) {
  item(work, of, None{});  // throws if undefined
  if (!is_indexed(of)) reject_operands("a slice", of, from);
  const Values items = to_items(work, of);
  const auto bound = [](const Value& v, int64_t otherwise) {
    if (!v.is<None>() && !integer(v)) bad_input("expected an integer in a slice, got {}", type_name(v));
    return integer(v).value_or(otherwise);
  };
  const int64_t size = std::ssize(items), by = bound(step, 1), low = by > 0 ? 0 : -1, high = by > 0 ? size : size - 1;
  if (by == 0) throw InputError("a slice requires a nonzero step");
  const auto place = [&](const Value& v, int64_t otherwise) {
    const int64_t i = bound(v, otherwise);
    return v.is<None>() ? i : std::clamp(i < 0 ? i + size : i, low, high);
  };
  const int64_t end = place(to, by > 0 ? high : low);
  Values out;
  for (__int128 i = place(from, by > 0 ? low : high); by > 0 ? i < end : i > end; i += by)
    out.push_back(items[static_cast<size_t>(i)]);
  if (of.sequence()) return make_sequence(work, std::move(out), of.sequence()->form);
  std::string text;
  for (const Value& c : out) text += *c.text();
  return text;
}

Value operated(RenderContext& work, std::string_view op, const Value& a, const Value& b) {
  if (std::string_view("+-*///%~").find(op) == std::string_view::npos) return compare(work, op, a, b);
  if (op == "~") return printed(work, a) + printed(work, b);
  require_plain(a), require_plain(b);
  if (op == "+" && a.text() && b.text()) return printed(work, a) + printed(work, b);
  if (op == "+" && is_listed(a) && is_listed(b) && a.sequence()->form == b.sequence()->form) {
    Values items = a.sequence()->items;
    items.insert(items.end(), b.sequence()->items.begin(), b.sequence()->items.end());
    return make_sequence(work, std::move(items), a.sequence()->form);
  }
  if (op == "*" && a.text() && integer(b)) return repeated(work, *a.text(), *integer(b));
  if (op == "*" && b.text() && integer(a)) return repeated(work, *b.text(), *integer(a));
  const auto m = number(a), n = number(b);
  const bool rests = op == "%" || op == "//", exact = integer(a) && integer(b);
  const std::string what = fmt::format("the operator {}", op);
  if (!m || !n) reject_operands(what, a, b);
  if (rests && !exact) throw InputError(what + " is supported only for integers");
  if (*n == 0 && (rests || op == "/")) throw InputError("division by zero");
  if (exact && op != "/") return of_integers(op, *integer(a), *integer(b));
  return op == "+" ? *m + *n : op == "-" ? *m - *n : op == "*" ? *m * *n : *m / *n;
}

}  // namespace tessera::jinja
