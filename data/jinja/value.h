// Values of a template: Python's, as far as templates see them.
#pragma once
#include <compare>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <variant>

#include "tensor/error.h"

namespace tessera::jinja {

using Text = std::shared_ptr<const std::string>;  // UTF-8
struct Undefined {
  Text name = nullptr;  // the name that has no value
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

  bool marked = false;  // a text by `safe`, which Python joins to others in its own way
};
using Values = std::vector<Value>;
using Pairs = std::vector<std::pair<std::string, Value>>;

// An iterator is what filters like `map` give: it is read once, and has no length. A view is that of a dict's items.
enum class Form : uint8_t { list, tuple, range, view, iterator };
struct Sequence {
  Values items;
  Form form = Form::list;
  int depth = 1;  // levels of nesting, this one included
};
struct Dict {
  Pairs items;  // in order of insertion
  int depth = 1;
};

// A value that is neither printed nor compared: a function or macro, a loop, a namespace.
struct RenderContext;
struct Call;
struct Object {
  std::function<Value(Call)> call = nullptr;
  std::function<Value(const std::string&)> attribute = nullptr;
  std::optional<std::map<std::string, Value>> fields = {};  // a namespace's
};

// The names that have values at a place of a template.
struct Scope {
  std::shared_ptr<Scope> outer = nullptr;
  std::map<std::string, Value> values = {};
};

struct Rendered {
  std::string text = {};
  std::vector<std::pair<size_t, size_t>> generated = {};  // begin and end of what `generation` blocks made
};

// A rendering: its place, its work, which has a bound, so that a hostile template ends, and its objects, which end
// with it.
struct RenderContext : NotCopied {
  explicit RenderContext(size_t most = size_t{1} << 28) : left(most) {}
  // A unit is about a nanosecond, or a byte that is made. Throws InputError at the bound.
  void charge(size_t units) {
    if (units > left) throw InputError("does more work, or makes more text, than a template should");
    left -= units;
  }
  Value keep(Object object) {
    charge(256);
    return &objects.emplace_back(std::move(object));
  }

  size_t left;
  Rendered main = {};
  std::string* out = &main.text;  // of a macro or a block its own
  std::shared_ptr<Scope> scope = nullptr;
  int depth = 0, line = 1;
  std::deque<Object> objects = {};
};

// Throw InputError for values nested deeper than 100.
Value make_sequence(RenderContext& work, Values items, Form form = Form::list);
Value make_dict(RenderContext& work, const Pairs& items);

std::string_view type_name(const Value& v);
bool truth(const Value& v);
bool compare(RenderContext& work, std::string_view op, const Value& a, const Value& b);  // ==, <, in, "not in", ...
const Value* find(RenderContext& work, const Dict& dict, const std::string& key);
const std::string& to_key(const Value& v);       // throws InputError for what is no text
std::optional<int64_t> integer(const Value& v);  // of a boolean too
std::optional<double> number(const Value& v);    // of those too
std::string printed(RenderContext& work, const Value& v);
// The items that a loop over the value meets; an iterator is empty afterwards. Throws InputError where there are none.
Values to_items(RenderContext& work, const Value& v);
// The value of x[key], or Undefined. Throws InputError for an undefined x.
Value item(RenderContext& work, const Value& of, const Value& key);
// The value of x.key, or of x[key]: of the type's method, an object's attribute, or an item. Throws as item() does.
Value member(RenderContext& work, const Value& of, const Value& key, bool dotted);
// Gives a value to one name, or its items to several. Throws InputError for more or fewer.
void assign(RenderContext& work, const std::vector<Text>& names, const Value& value);
// The value that a name has, or that Jinja gives it, or Undefined.
Value named_value(RenderContext& work, const Text& name);
// The value of loop.name in a loop that is so far. Throws InputError for other names.
Value loop_attribute(const Values& items, size_t at, const std::string& name);
// The value of x[from:to:step], each of which may be none.
Value slice(RenderContext& work, const Value& of, const Value& from, const Value& to, const Value& step);
// The result of an operator: + - * / // % ~, or a comparison. Throws InputError as Python does TypeError, for % of a
// text, for an integer beyond 64 bits, and for // and % of a number that is no integer.
Value operated(RenderContext& work, std::string_view op, const Value& a, const Value& b);

// How values are written: as Python's repr() does, or as JSON.
struct Style {
  bool json = false, ascii = false, sorted = false;
  std::optional<std::string> indent = {};  // of one level
  std::string comma = ", ", colon = ": ";
};
std::string written(RenderContext& work, const Value& v, const Style& style);

// Texts as Python takes them; blanks are stripped, or these characters.
std::u32string code_points(std::string_view text);
std::string utf8(std::u32string_view points);
bool is_space(char32_t c);
std::string unescaped(std::string_view text);  // of a literal; throws InputError for escapes that are not known
std::string_view stripped(std::string_view text, bool left, bool right, const std::string* characters = nullptr);

// Arguments of a call, of which any may be missing. The first of a filter, a test or a method is the value that it is
// applied to.
struct Call {
  RenderContext& work;
  Values given;
  Pairs named = {};
  std::string_view name = {};  // of the builtin

  const Value& at(size_t i) const;  // Undefined where it is missing
  bool has(size_t i) const { return !at(i).is<Undefined>() && !at(i).is<None>(); }
  std::string text(size_t i) const { return printed(work, at(i)); }
  // Throw InputError for other types.
  const std::string& exact(size_t i) const;
  int64_t whole(size_t i, int64_t otherwise) const;
};
struct Builtin {
  std::string_view name;        // in a table, words: names that share a function
  std::string_view parameters;  // names in order; of "*" any, which the function reads itself
  Value (*function)(const Call&);
};
enum class Group : uint8_t { filters, tests, globals, text, dict };
std::optional<Builtin> find_builtin(Group group, std::string_view name);
// The method that a value has by that name.
std::optional<Builtin> find_method(const Value& of, const Value& name);
// Calls it, named arguments brought to their places. Throws InputError.
Value apply(const Builtin& builtin, Call call);

}  // namespace tessera::jinja
