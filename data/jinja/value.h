// Values of a template: Python's, as far as templates see them.
#pragma once
#include <compare>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "tensor/error.h"

namespace tessera::jinja {

struct Undefined {
  std::shared_ptr<const std::string> name = nullptr;  // the name that has no value
};
struct None {};
using Text = std::shared_ptr<const std::string>;  // UTF-8
struct Sequence;
struct Dict;
class Object;

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
  const Sequence* sequence() const;
  const Dict* dict() const;
};
using Values = std::vector<Value>;
using Pairs = std::vector<std::pair<Value, Value>>;

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
inline const Sequence* Value::sequence() const {
  return is<std::shared_ptr<Sequence>>() ? as<std::shared_ptr<Sequence>>()->get() : nullptr;
}
inline const Dict* Value::dict() const {
  return is<std::shared_ptr<const Dict>>() ? as<std::shared_ptr<const Dict>>()->get() : nullptr;
}

// Arguments of a call. The first of a filter, a test or a method is the value that it is applied to.
struct Arguments {
  Values given;
  std::vector<std::pair<std::string, Value>> named = {};
};

// A rendering's work, which has a bound, so that a hostile template ends; and its objects, which end with it.
class Work {
 public:
  explicit Work(size_t most = size_t{1} << 28) : left_(most) {}
  // A unit is about a nanosecond, or a byte that is made. Throws InputError at the bound.
  void charge(size_t units);
  template <class T>
  T* keep(std::unique_ptr<T> object) {
    charge(256);
    T* const at = object.get();
    objects_.push_back(std::move(object));
    return at;
  }

 private:
  size_t left_;
  std::deque<std::unique_ptr<Object>> objects_;
};

// A value that is neither printed nor compared: a namespace, a loop, a macro, a function.
class Object {
 public:
  Object() = default;
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  virtual ~Object() = default;
  virtual Value attribute(const std::string&) { return Undefined{}; }
  virtual void set_attribute(const std::string&, Value) {
    throw InputError("an attribute is set of what is no namespace");
  }
  virtual Value call(Work&, Arguments&&) { throw InputError("the value that is called is no function"); }
};

// Throw InputError for values nested deeper than 100, and a dict for keys that Python does not hash.
Value sequence_of(Work& work, Values items, Form form = Form::list);
Value dict_of(Work& work, Pairs items);

std::string_view type_name(const Value& v);
bool truth(const Value& v);
bool equal(Work& work, const Value& a, const Value& b);
std::partial_ordering order(Work& work, const Value& a, const Value& b);  // throws InputError for unlike types
bool contains(Work& work, const Value& container, const Value& v);
const Value* find(Work& work, const Dict& dict, const Value& key);
std::optional<int64_t> integer(const Value& v);  // of a boolean too
std::optional<double> number(const Value& v);    // of those too
std::string printed(Work& work, const Value& v);
// The items that a loop over the value meets; an iterator is empty afterwards. Throws InputError where there are none.
Values items_of(Work& work, const Value& v);
// The value of x[key], or nothing. Throws InputError for an undefined x.
std::optional<Value> item(Work& work, const Value& of, const Value& key);
// The result of an operator: + - * / % ~, or i for //, p for **. Throws InputError as Python does TypeError, and for
// an integer beyond 64 bits.
Value arithmetic(Work& work, char op, const Value& a, const Value& b);

bool compare(Work& work, std::string_view op, const Value& a, const Value& b);  // ==, <, in, "not in", ...
// The value of x[from:to:step], each of which may be none.
Value slice(Work& work, const Value& of, const Value& from, const Value& to, const Value& step);

// How values are written: as Python's repr() does, or as JSON.
struct Style {
  bool json = false, ascii = false, sorted = false;
  std::optional<std::string> indent = {};  // of one level
  std::string comma = ", ", colon = ": ";
};
std::string written(Work& work, const Value& v, const Style& style);

// The value of a nlohmann::json or ordered_json.
template <class Json>
Value from_json(Work& work, const Json& json) {
  if (json.is_null()) return None{};
  if (json.is_boolean()) return json.template get<bool>();
  if (json.is_number_float()) return json.template get<double>();
  if (json.is_number()) return json.template get<int64_t>();
  if (json.is_string()) return json.template get<std::string>();
  if (json.is_array()) {
    Values items;
    for (const Json& item : json) items.push_back(from_json(work, item));
    return sequence_of(work, std::move(items));
  }
  Pairs items;
  for (const auto& [key, value] : json.items()) items.emplace_back(key, from_json(work, value));
  return dict_of(work, std::move(items));
}

// Texts as Python takes them.
std::u32string code_points(std::string_view text);
std::string utf8(std::u32string_view points);
bool is_space(char32_t c);
std::string_view stripped(std::string_view text, bool left, bool right, const std::string* characters = nullptr);
std::string lower(std::string_view s);
std::string upper(std::string_view s);
// A letter that `begins` says begins a word, by the character before it (0: none), is large, all others are small.
std::string titled(std::string_view s, bool (*begins)(char32_t before));
bool is_letter(char32_t c);
std::vector<std::string> lines_of(std::string_view s);  // as splitlines() takes them
std::string replaced(Work& work, const std::string& s, const std::string& old, const std::string& by, int64_t most);

struct Builtin {
  std::string_view name;
  std::string_view parameters;  // names in order; of "*" any, which the function reads itself
  Value (*function)(Work&, Arguments&);
};
enum class Group : uint8_t { filters, tests, globals, text, dict, list };
const Builtin* find_builtin(Group group, std::string_view name);  // none: nullptr
// The method that a value has by that name; none: nullptr. Throws InputError for one that the sandbox refuses.
const Builtin* find_method(const Value& of, const Value& name);
// Calls it, named arguments brought to their places. Throws InputError.
Value apply(Work& work, const Builtin& builtin, Arguments arguments);

}  // namespace tessera::jinja
