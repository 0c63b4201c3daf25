// What Python does with values.
#include "data/jinja/value.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "data/utf8.h"

namespace tessera::jinja {
namespace {

constexpr int kDeepest = 100;

// Numbers stand between double quotes, or between those that the text does not have.
void append_quoted(std::string& out, const std::string& text) {
  const char quote = text.find('\'') != std::string::npos && text.find('"') == std::string::npos ? '"' : '\'';
  out += quote;
  for (const char32_t c : code_points(text)) {
    const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
    const bool shows = c == ' ' || (category != UTF8PROC_CATEGORY_CN && category < UTF8PROC_CATEGORY_ZS);
    if (c == '\n' || c == '\r' || c == '\t')
      out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    else if (!shows)
      out += c < 0x100     ? fmt::format("\\x{:02x}", static_cast<uint32_t>(c))
             : c < 0x10000 ? fmt::format("\\u{:04x}", static_cast<uint32_t>(c))
                           : fmt::format("\\U{:08x}", static_cast<uint32_t>(c));
    else if (c == '\\' || c == static_cast<unsigned char>(quote))
      (out += '\\') += static_cast<char>(c);
    else
      append_utf8(out, c);
  }
  out += quote;
}

std::string real_text(double d) {
  std::string out = fmt::format("{}", d);
  if (out.find_first_not_of("-0123456789") == std::string::npos) out += ".0";
  return out;
}

void append_json_text(std::string& out, const std::string& text, bool ascii) {
  out += '"';
  for (const char32_t c : code_points(text)) {
    const size_t named = std::u32string_view(U"\"\\\n\r\t\f\b").find(c);
    const auto number = static_cast<uint32_t>(c);
    if (named != std::u32string_view::npos)
      (out += '\\') += "\"\\nrtfb"[named];
    else if (c < 0x20 || (ascii && c > 0x7e && c < 0x10000))
      out += fmt::format("\\u{:04x}", number);
    else if (ascii && c >= 0x10000)
      out += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + ((number - 0x10000) >> 10), 0xDC00 + (number & 0x3FF));
    else
      append_utf8(out, c);
  }
  out += '"';
}

class Writer {
 public:
  Writer(Work& work, const Style& style, std::string& out) : work_(work), style_(style), out_(out) {}

  void write(const Value& v, int level = 0) {
    work_.charge(32);
    const Sequence* const s = v.sequence();
    const double* const real = v.as<double>();
    if (const std::string* const text = v.text()) {
      work_.charge(text->size());
      if (style_.json)
        append_json_text(out_, *text, style_.ascii);
      else
        append_quoted(out_, *text);
    } else if (v.is<None>()) {
      out_ += style_.json ? "null" : "None";
    } else if (v.is<bool>()) {
      out_ += style_.json ? (truth(v) ? "true" : "false") : (truth(v) ? "True" : "False");
    } else if (v.is<int64_t>()) {
      out_ += std::to_string(*v.as<int64_t>());
    } else if (real && style_.json && !std::isfinite(*real)) {
      out_ += std::isnan(*real) ? "NaN" : *real > 0 ? "Infinity" : "-Infinity";
    } else if (real) {
      out_ += real_text(*real);
    } else if (const Dict* const dict = v.dict()) {
      Pairs items = dict->items;
      if (style_.sorted)
        std::ranges::stable_sort(
            items, [&](const Value& x, const Value& y) { return order(work_, x, y) < 0; }, &Pairs::value_type::first);
      all('{', items, "}", level, [&](const auto& pair) {
        key(pair.first);
        out_ += style_.colon;
        write(pair.second, level + 1);
      });
    } else if (s && s->form <= Form::tuple) {
      const bool tuple = s->form == Form::tuple && !style_.json;
      const std::string_view end = tuple && s->items.size() == 1 ? ",)" : tuple ? ")" : "]";
      all(tuple ? '(' : '[', s->items, end, level, [&](const Value& one) { write(one, level + 1); });
    } else if (v.is<Undefined>() && !style_.json) {
      out_ += "Undefined";
    } else {
      throw InputError(fmt::format("{} is not printed; expected a text, or |list behind it", type_name(v)));
    }
  }

 private:
  template <class Items, class F>
  void all(char open, const Items& items, std::string_view close, int level, const F& one) {
    const auto line = [&](int levels) {
      if (!style_.indent || items.empty()) return;
      out_ += '\n';
      for (int i = 0; i < levels; ++i) out_ += *style_.indent;
      work_.charge(style_.indent->size() * static_cast<size_t>(levels));
    };
    out_ += open;
    for (const auto& each : items) {
      if (&each != items.data()) out_ += style_.comma;
      line(level + 1);
      one(each);
    }
    line(level);
    out_ += close;
  }
  void key(const Value& v) {
    if (!style_.json || v.text()) return write(v);
    if (v.sequence()) throw InputError("a key of JSON is no tuple");
    out_ += '"';
    write(v);
    out_ += '"';
  }

  Work& work_;
  const Style& style_;
  std::string& out_;
};

[[noreturn]] void refuse(std::string_view operation, const Value& a, const Value& b) {
  throw InputError(fmt::format("{} of {} and {}", operation, type_name(a), type_name(b)));
}

int64_t whole(bool overflows, const int64_t& value) {
  if (overflows) throw InputError("an integer is beyond 64 bits");
  return value;
}

Value of_integers(char op, int64_t a, int64_t b) {
  int64_t out = 0;
  if (op == '+') return whole(__builtin_add_overflow(a, b, &out), out);
  if (op == '-') return whole(__builtin_sub_overflow(a, b, &out), out);
  if (op == '*') return whole(__builtin_mul_overflow(a, b, &out), out);
  if (op == 'p') {
    out = 1;
    if (a == 0 || a == 1 || a == -1) return b == 0 || a == 1 || (a == -1 && b % 2 == 0) ? int64_t{1} : a;
    for (; b > 0; --b) whole(__builtin_mul_overflow(out, a, &out), out);
    return out;
  }
  whole(a == INT64_MIN && b == -1, 0);
  const bool down = a % b != 0 && (a < 0) != (b < 0);
  return op == 'i' ? a / b - (down ? 1 : 0) : a % b + (down ? b : 0);
}

Value of_reals(char op, double a, double b) {
  if (op == '+') return a + b;
  if (op == '-') return a - b;
  if (op == '*') return a * b;
  if (op == '/') return a / b;
  if (op == 'p') {
    const double out = std::pow(a, b);
    if (std::isnan(out) && !std::isnan(a) && !std::isnan(b)) throw InputError("a power is no real number");
    if (std::isinf(out) && std::isfinite(a) && std::isfinite(b)) throw InputError("a power is too large");
    return out;
  }
  double rest = std::fmod(a, b);
  if (rest != 0 && (b < 0) != (rest < 0)) rest += b;
  if (op == '%') return rest == 0 ? std::copysign(0.0, b) : rest;
  const double exact = (a - rest) / b, floor = std::floor(exact);
  return exact == 0 ? std::copysign(0.0, a / b) : exact - floor > 0.5 ? floor + 1 : floor;
}

// A text or a list so many times.
Value repeated(Work& work, const Value& v, int64_t times) {
  const size_t n = times < 0 ? 0 : static_cast<size_t>(times);
  const size_t size = v.text() ? v.text()->size() : v.sequence()->items.size() * 32;
  if (n > 0 && size > (size_t{1} << 40) / n) work.charge(SIZE_MAX);
  work.charge(size * n);
  if (size == 0) return v;
  if (const std::string* const text = v.text()) {
    std::string out;
    for (size_t i = 0; i < n; ++i) out += *text;
    return out;
  }
  Values out;
  for (size_t i = 0; i < n; ++i) out.insert(out.end(), v.sequence()->items.begin(), v.sequence()->items.end());
  return sequence_of(work, std::move(out), v.sequence()->form);
}

// Python's text % values, without widths for texts.
std::string formatted(Work& work, const std::string& text, const Value& values) {
  const Sequence* const several = values.sequence();
  const bool tuple = several && several->form == Form::tuple;
  const Values all = tuple ? several->items : Values{values};
  std::string out;
  size_t next = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    if (text[at] != '%' || text.substr(at, 2) == "%%") {
      out += text[at];
      at += text[at] == '%' ? 1 : 0;
      continue;
    }
    const Value* value = nullptr;
    if (text.substr(at + 1, 1) == "(") {
      const size_t close = text.find(')', at);
      if (close == std::string::npos || !values.dict()) throw InputError("the names of a format need a mapping");
      value = find(work, *values.dict(), text.substr(at + 2, close - at - 2));
      at = close;
    } else if (next < all.size()) {
      value = &all[next++];
    }
    if (!value) throw InputError("a value of a format is missing");
    const auto behind = [&](size_t from, const char* any) {
      return std::min(text.find_first_not_of(any, from), text.size());
    };
    size_t end = behind(behind(at + 1, "-+ 0"), "0123456789");
    if (end < text.size() && text[end] == '.') end = behind(end + 1, "0123456789");
    std::string spec = "%" + text.substr(at + 1, end - at - 1);
    at = end;
    const char kind = at < text.size() ? text[at] : '\0';
    const auto real = number(*value);
    const auto exact = integer(*value);
    char made[10400];
    if ((kind == 's' || kind == 'r') && spec == "%") {
      out += kind == 's' ? printed(work, *value) : written(work, *value, {});
    } else if (real && spec.size() <= 5 && kind != '\0' &&
               std::string_view("feg").find(kind) != std::string_view::npos) {
      std::snprintf(made, sizeof(made), (spec += kind).c_str(), *real);
      out += made;
    } else if (spec.size() <= 5 && (kind == 'd' || kind == 'i' || (kind == 'x' && exact && *exact >= 0)) && real &&
               std::fabs(*real) < 9e18) {
      const long long whole_part = exact ? *exact : static_cast<int64_t>(*real);
      std::snprintf(made, sizeof(made), ((spec += "ll") += kind).c_str(), whole_part);
      out += made;
    } else {
      throw InputError(fmt::format("the format {}{} is not known for {}", spec, kind, type_name(*value)));
    }
    work.charge(out.size() / 16 + 64);
  }
  if (next < all.size() && !values.dict() && (tuple || !several))
    throw InputError("a format has fewer places than there are values");
  return out;
}

}  // namespace

void Work::charge(size_t units) {
  if (units > left_) throw InputError("does more work, or makes more text, than a template should");
  left_ -= units;
}

namespace {
int level_of(int below) {
  if (below >= kDeepest) throw InputError(fmt::format("values are nested deeper than {}", kDeepest));
  return below + 1;
}
int depth_of(const Value& v) { return v.sequence() ? v.sequence()->depth : v.dict() ? v.dict()->depth : 0; }
bool hashes(const Value& v) {
  const Sequence* const s = v.sequence();
  if (s && s->form == Form::tuple) return std::all_of(s->items.begin(), s->items.end(), hashes);
  return !v.dict() && !(s && s->form == Form::list);
}
}  // namespace

Value sequence_of(Work& work, Values items, Form form) {
  work.charge(64 + 32 * items.size());
  int below = 0;
  for (const Value& v : items) below = std::max(below, depth_of(v));
  return std::make_shared<Sequence>(Sequence{std::move(items), form, level_of(below)});
}

Value dict_of(Work& work, Pairs items) {
  Dict out;
  int below = 0;
  for (auto& [key, value] : items) {
    if (!hashes(key)) throw InputError(fmt::format("{} cannot be a key", type_name(key)));
    below = std::max({below, depth_of(key), depth_of(value)});
    if (const Value* const found = find(work, out, key))
      const_cast<Value&>(*found) = std::move(value);
    else
      out.items.emplace_back(std::move(key), std::move(value));
  }
  work.charge(64 + 64 * out.items.size());
  out.depth = level_of(below);
  return std::make_shared<const Dict>(std::move(out));
}

std::string_view type_name(const Value& v) {
  static constexpr std::array<std::string_view, 9> kNames = {"an undefined value", "none",   "a boolean", "an integer",
                                                             "a number",           "a text", "a list",    "a mapping",
                                                             "an object"};
  static constexpr std::array<std::string_view, 5> kForms = {"a list", "a tuple", "a range", "a view", "an iterator"};
  return v.sequence() ? kForms[static_cast<size_t>(v.sequence()->form)] : kNames[v.index()];
}

bool truth(const Value& v) {
  if (v.is<Undefined>() || v.is<None>()) return false;
  if (const auto n = number(v)) return *n != 0;
  if (v.text()) return !v.text()->empty();
  if (v.dict()) return !v.dict()->items.empty();
  return !v.sequence() || v.sequence()->form == Form::iterator || !v.sequence()->items.empty();
}

std::optional<int64_t> integer(const Value& v) {
  if (const bool* const b = v.as<bool>()) return *b ? 1 : 0;
  return v.is<int64_t>() ? std::optional(*v.as<int64_t>()) : std::nullopt;
}

std::optional<double> number(const Value& v) {
  if (const auto i = integer(v)) return static_cast<double>(*i);
  return v.is<double>() ? std::optional(*v.as<double>()) : std::nullopt;
}

bool equal(Work& work, const Value& a, const Value& b) {
  work.charge(16);
  if (integer(a) && integer(b)) return *integer(a) == *integer(b);
  if (number(a) && number(b)) return *number(a) == *number(b);
  if (a.index() != b.index()) return false;
  if (a.text()) return *a.text() == *b.text();
  if (const Dict* const x = a.dict()) {
    const Dict* const y = b.dict();
    return x->items.size() == y->items.size() && std::all_of(x->items.begin(), x->items.end(), [&](const auto& pair) {
             const Value* const other = find(work, *y, pair.first);
             return other && equal(work, pair.second, *other);
           });
  }
  if (const Sequence* const x = a.sequence()) {
    const Sequence* const y = b.sequence();
    if (x->form != y->form || x->form > Form::range) return x == y;
    return x->items.size() == y->items.size() &&
           std::equal(x->items.begin(), x->items.end(), y->items.begin(),
                      [&](const Value& one, const Value& other) { return equal(work, one, other); });
  }
  return !a.is<Object*>() || *a.as<Object*>() == *b.as<Object*>();
}

std::partial_ordering order(Work& work, const Value& a, const Value& b) {
  work.charge(16);
  if (integer(a) && integer(b)) return *integer(a) <=> *integer(b);
  if (number(a) && number(b)) return *number(a) <=> *number(b);
  if (a.text() && b.text()) return a.text()->compare(*b.text()) <=> 0;
  const Sequence *const x = a.sequence(), *const y = b.sequence();
  if (!x || !y || x->form != y->form || x->form > Form::tuple) refuse("the order", a, b);
  for (size_t i = 0; i < std::min(x->items.size(), y->items.size()); ++i)
    if (!equal(work, x->items[i], y->items[i])) return order(work, x->items[i], y->items[i]);
  return x->items.size() <=> y->items.size();
}

const Value* find(Work& work, const Dict& dict, const Value& key) {
  for (const auto& [name, value] : dict.items)
    if (equal(work, name, key)) return &value;
  return nullptr;
}

bool contains(Work& work, const Value& container, const Value& v) {
  if (const std::string* const text = container.text()) {
    if (!v.text()) refuse("`in`", v, container);
    work.charge(text->size());
    return text->find(*v.text()) != std::string::npos;
  }
  if (container.dict()) {
    if (!hashes(v)) refuse("`in`", v, container);
    return find(work, *container.dict(), v) != nullptr;
  }
  const Values items = items_of(work, container);
  return std::any_of(items.begin(), items.end(), [&](const Value& one) { return equal(work, one, v); });
}

bool compare(Work& work, std::string_view op, const Value& a, const Value& b) {
  if (op == "==" || op == "!=") return equal(work, a, b) == (op == "==");
  if (op == "in" || op == "not in") return contains(work, b, a) == (op == "in");
  const auto found = order(work, a, b);
  return op == "<" ? found < 0 : op == "<=" ? found <= 0 : op == ">" ? found > 0 : found >= 0;
}

std::string printed(Work& work, const Value& v) {
  if (v.text()) work.charge(v.text()->size());
  return v.text() ? *v.text() : v.is<Undefined>() ? "" : written(work, v, {});
}

std::string written(Work& work, const Value& v, const Style& style) {
  std::string out;
  Writer(work, style, out).write(v);
  return out;
}

Values items_of(Work& work, const Value& v) {
  if (v.is<Undefined>()) return {};
  Values out;
  if (const std::string* const text = v.text()) {
    work.charge(64 * text->size());
    for (const char32_t c : code_points(*text)) out.emplace_back(utf8({&c, 1}));
  } else if (const Dict* const dict = v.dict()) {
    for (const auto& [key, value] : dict->items) out.push_back(key);
  } else if (const auto* const s = v.as<std::shared_ptr<Sequence>>()) {
    out = (*s)->form == Form::iterator ? std::exchange((*s)->items, {}) : (*s)->items;
  } else {
    throw InputError(fmt::format("{} has no items", type_name(v)));
  }
  work.charge(16 * out.size());
  return out;
}

std::optional<Value> item(Work& work, const Value& of, const Value& key) {
  if (const Undefined* const u = of.as<Undefined>())
    throw InputError(fmt::format("{} is undefined", u->name ? "'" + u->name->substr(0, 60) + "'" : "a value"));
  if (const Dict* const dict = of.dict()) {
    const Value* const found = hashes(key) ? find(work, *dict, key) : nullptr;
    return found ? std::optional(*found) : std::nullopt;
  }
  const Sequence* const s = of.sequence();
  const auto index = integer(key);
  if (!index || (!of.text() && !(s && s->form <= Form::range))) return {};
  const std::u32string points = of.text() ? code_points(*of.text()) : U"";
  if (of.text()) work.charge(of.text()->size());
  const int64_t size = std::ssize(s ? s->items : Values{}) + std::ssize(points);
  const int64_t at = *index < 0 ? *index + size : *index;
  if (at < 0 || at >= size) return {};
  return s ? s->items[static_cast<size_t>(at)]
           : Value(utf8(std::u32string_view(points).substr(static_cast<size_t>(at), 1)));
}

Value slice(Work& work, const Value& of, const Value& from, const Value& to, const Value& step) {
  const Sequence* const s = of.sequence();
  if (!of.text() && !(s && s->form <= Form::range)) refuse("a slice", of, from);
  const Values items = items_of(work, of);
  const auto bound = [](const Value& v, int64_t otherwise) {
    if (v.is<None>()) return otherwise;
    if (!integer(v)) throw InputError(fmt::format("{} stands in a slice", type_name(v)));
    return *integer(v);
  };
  const int64_t size = std::ssize(items), by = bound(step, 1), low = by > 0 ? 0 : -1, high = by > 0 ? size : size - 1;
  if (by == 0) throw InputError("a slice has no steps");
  const auto place = [&](const Value& v, int64_t otherwise) {
    const int64_t i = bound(v, otherwise);
    return v.is<None>() ? i : std::clamp(i < 0 ? i + size : i, low, high);
  };
  const int64_t end = place(to, by > 0 ? high : low);
  Values out;
  for (__int128 i = place(from, by > 0 ? low : high); by > 0 ? i < end : i > end; i += by)
    out.push_back(items[static_cast<size_t>(i)]);
  if (s) return sequence_of(work, std::move(out), s->form);
  std::string text;
  for (const Value& c : out) text += *c.text();
  return text;
}

Value arithmetic(Work& work, char op, const Value& a, const Value& b) {
  if (op == '~') return printed(work, a) + printed(work, b);
  const Sequence *const x = a.sequence(), *const y = b.sequence();
  if (op == '%' && a.text()) return formatted(work, *a.text(), b);
  if (op == '+' && a.text() && b.text()) {
    work.charge(a.text()->size() + b.text()->size());
    return *a.text() + *b.text();
  }
  if (op == '+' && x && y && x->form == y->form && x->form <= Form::tuple) {
    Values items = x->items;
    items.insert(items.end(), y->items.begin(), y->items.end());
    return sequence_of(work, std::move(items), x->form);
  }
  const auto repeats = [](const Value& v) { return v.text() || (v.sequence() && v.sequence()->form <= Form::tuple); };
  if (op == '*' && repeats(a) && integer(b)) return repeated(work, a, *integer(b));
  if (op == '*' && repeats(b) && integer(a)) return repeated(work, b, *integer(a));
  const auto m = number(a), n = number(b);
  if (!m || !n) refuse(fmt::format("the operator {}", op == 'i' ? "//" : op == 'p' ? "**" : std::string(1, op)), a, b);
  if (*n == 0 && (op == '/' || op == 'i' || op == '%')) throw InputError("a division by zero");
  if (*m == 0 && *n < 0 && op == 'p') throw InputError("a power of zero is negative");
  if (integer(a) && integer(b) && op != '/' && (op != 'p' || *n >= 0)) return of_integers(op, *integer(a), *integer(b));
  return of_reals(op, *m, *n);
}

namespace {

// What Python's types have besides: refused by name, lest a template take it for undefined.
constexpr std::string_view kTextRest =
    " casefold center encode expandtabs format format_map index isdigit rfind isalnum isalpha isascii isdecimal "
    "isidentifier islower "
    "isnumeric isprintable isspace istitle isupper ljust maketrans partition removeprefix removesuffix rindex rjust "
    "rpartition swapcase translate zfill ";
constexpr std::string_view kDictRest = " clear copy fromkeys pop popitem setdefault update ";
constexpr std::string_view kListRest = " append clear copy count extend index insert pop remove reverse sort ";

}  // namespace

const Builtin* find_method(const Value& of, const Value& key) {
  const Sequence* const s = of.sequence();
  if (!key.text() || !(of.text() || of.dict() || (s && s->form <= Form::range))) return nullptr;
  const std::string& name = *key.text();
  const Builtin* const found = find_builtin(of.text() ? Group::text : of.dict() ? Group::dict : Group::list, name);
  const std::string_view refused = of.text() ? kTextRest : of.dict() ? kDictRest : kListRest;
  if (!found && (refused.find(" " + name + " ") != std::string_view::npos || name.starts_with("__")))
    throw InputError(fmt::format("the method '{}' of {} is not known, or changes it", name, type_name(of)));
  return found;
}

}  // namespace tessera::jinja
