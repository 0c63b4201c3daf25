// Template values, with Python's semantics as far as templates can observe them.
#pragma once
#include <algorithm>
#include <compare>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/error.h"

namespace tessera::jinja {

using Text = std::shared_ptr<const std::string>;  // UTF-8
struct Undefined {
  Text name = nullptr;  // of the undefined variable
};
struct None {};
struct Sequence;
struct Dict;
struct Object;

using Alternatives = std::variant<Undefined, None, bool, int64_t, double, Text, std::shared_ptr<Sequence>,
                                  std::shared_ptr<const Dict>, Object*>;
struct Value : Alternatives {
  using Alternatives::Alternatives;
  Value(std::string text) : Alternatives(std::make_shared<const std::string>(std::move(text))) {}
  template <class T>
  bool is() const {
    return std::holds_alternative<T>(*this);
  }
  template <class T>
  const T* as() const {
    return std::get_if<T>(this);
  }
  const std::string* text() const { return is<Text>() ? as<Text>()->get() : nullptr; }
  Sequence* sequence() const { return is<std::shared_ptr<Sequence>>() ? std::get<6>(*this).get() : nullptr; }
  const Dict* dict() const { return is<std::shared_ptr<const Dict>>() ? std::get<7>(*this).get() : nullptr; }
  Object* object() const { return is<Object*>() ? std::get<8>(*this) : nullptr; }

  bool marked = false;  // output of `safe`, concatenated by the rules of Python's Markup
};
using Values = std::vector<Value>;
using Pairs = std::vector<std::pair<std::string, Value>>;

// iterator: result of filters like `map`, readable once and without length. view: dict.items().
enum class Form : uint8_t { list, tuple, range, view, iterator };
struct Sequence {
  Values items;
  Form form = Form::list;
  int depth = 1;  // levels of nesting, including this one
};
struct Dict {
  Pairs items;  // in insertion order
  int depth = 1;
};

struct RenderContext;
struct Call;
// A function, macro, loop or namespace, which can be neither printed nor compared.
struct Object {
  std::function<Value(Call)> call = nullptr;
  std::function<Value(const std::string&)> attribute = nullptr;
  std::optional<std::map<std::string, Value>> fields = {};  // of a namespace
};

struct Scope {
  std::shared_ptr<Scope> outer = nullptr;
  std::map<std::string, Value> values = {};
};

struct Rendered {
  std::string text = {};
  std::vector<std::pair<size_t, size_t>> generated = {};  // begin and end of the output of `generation` blocks
};

// The state of one rendering, which owns its objects. The work limit stops malicious templates.
struct RenderContext : NotCopied {
  explicit RenderContext(size_t max_work = size_t{1} << 28) : left(max_work) {}
  // One unit is about a nanosecond or one byte of output. Throws InputError at the limit.
  void charge(size_t units) {
    if (units > left) throw InputError("exceeds the limits on work or output of a template");
    left -= units;
  }
  Value store(Object object) {
    charge(256);
    return &objects.emplace_back(std::move(object));
  }

  size_t left;
  Rendered main = {};
  std::string* out = &main.text;  // redirected within macros and blocks
  std::shared_ptr<Scope> scope = nullptr;
  int depth = 0, line = 1;
  std::deque<Object> objects = {};
};

// Both throw InputError for nesting deeper than 100.
Value make_sequence(RenderContext& work, Values items, Form form = Form::list);
Value make_dict(RenderContext& work, const Pairs& items);

std::string_view type_name(const Value& v);
bool truth(const Value& v);
bool compare(RenderContext& work, std::string_view op, const Value& a, const Value& b);  // ==, <, in, "not in", ...
const Value* find_item(RenderContext& work, const Dict& dict, const std::string& key);
const std::string& to_key(const Value& v);       // throws InputError unless it is a string
std::optional<int64_t> integer(const Value& v);  // also of booleans
std::optional<double> number(const Value& v);    // also of integers and booleans
std::string printed(RenderContext& work, const Value& v);
// The items of a loop; exhausts an iterator. Throws InputError if the value is not iterable.
Values to_items(RenderContext& work, const Value& v);
// x[key]; Undefined if missing. Throws InputError if x is undefined.
Value item(RenderContext& work, const Value& of, const Value& key);
// x.key or x[key]: a method, an attribute or an item. Throws as item() does.
Value member(RenderContext& work, const Value& of, const Value& key, bool dotted);
// Unpacks the value if there are several names. Throws InputError if the number of items differs.
void assign(RenderContext& work, const std::vector<Text>& names, const Value& value);
// The variable, else Jinja's global, else Undefined.
Value named_value(RenderContext& work, const Text& name);
// loop.name at iteration `at`. Throws InputError for other names.
Value loop_attribute(const Values& items, size_t at, const std::string& name);
// x[from:to:step]; each bound may be none.
Value slice(RenderContext& work, const Value& of, const Value& from, const Value& to, const Value& step);
// Evaluates + - * / // % ~ or a comparison. Throws InputError if Python would raise TypeError, and for % of a string,
// integers beyond 64 bits, and // and % of non-integers.
Value operated(RenderContext& work, std::string_view op, const Value& a, const Value& b);

// Formats values as Python's repr() or as JSON.
struct Style {
  bool json = false, ascii = false, sorted = false;
  std::optional<std::string> indent = {};  // indentation per nesting level
  std::string comma = ", ", colon = ": ";
};
std::string written(RenderContext& work, const Value& v, const Style& style);

// stripped() removes white space, or the given characters.
std::u32string code_points(std::string_view text);
std::string utf8(std::u32string_view points);
bool is_space(char32_t c);
std::string unescaped(std::string_view text);  // of a literal; throws InputError for unknown escapes
std::string_view stripped(std::string_view text, bool left, bool right, const std::string* characters = nullptr);

// Any argument may be missing. The first argument of a filter, test or method is the value that it applies to.
struct Call {
  RenderContext& work;
  Values given;
  Pairs named = {};
  std::string_view name = {};  // of the builtin

  const Value& at(size_t i) const;  // Undefined if missing
  bool has(size_t i) const { return !at(i).is<Undefined>() && !at(i).is<None>(); }
  std::string text(size_t i) const { return printed(work, at(i)); }
  // Both throw InputError for other types.
  const std::string& exact(size_t i) const;
  int64_t int_at(size_t i, int64_t otherwise) const;
};
struct Builtin {
  std::string_view name;        // in a table: space-separated synonyms
  std::string_view parameters;  // names in order; "*": any, interpreted by the function
  Value (*function)(const Call&);
};
enum class Group : uint8_t { filters, tests, globals, text, dict };
std::optional<Builtin> find_builtin(Group group, std::string_view name);
std::optional<Builtin> find_method(const Value& of, const Value& name);
// Moves named arguments to their positions. Throws InputError.
Value apply(const Builtin& builtin, Call call);

}  // namespace tessera::jinja
