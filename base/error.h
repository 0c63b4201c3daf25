// Exceptions and exit statuses.
//
// A message is one line of at most 1,000 bytes with control characters escaped; it names the option, key, file, tensor
// or rank, and the expected and actual value. Ops prefix their name: `[matmul] inner dims differ: a (4, 8) x b (6, 3);
// b must have 8 rows`.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace tessera {

enum class Status {
  verification = 1,  // a contract check failed
  usage = 2,
  communication = 3,  // a rank or its communication failed
  input = 4,
  not_finite = 5,
  output = 6,
};

std::string one_line(const std::string& message);
// Escapes control characters other than line breaks and tabs, so that text from files or peers cannot control a
// terminal.
std::string for_terminal(std::string_view text);

// Throws Error("WHAT: expected an object, got null") if `object` is null. Compiled separately, so that no compiler
// removes the null check of a reference's address.
void require_object(const void* object, const char* what);
// Throws Error("[FUNCTION] expected EXPECTED, got GOT").
[[noreturn]] void reject(const char* function, const std::string& expected, const std::string& got);
// Returns the index; throws Error("[FUNCTION] expected WHAT below COUNT, got INDEX") unless 0 <= index < count.
size_t checked_index(const char* function, const char* what, int64_t index, int64_t count);

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, Status status = Status::usage)
      : std::runtime_error(one_line(message)), status_(status) {}
  Status status() const { return status_; }

 private:
  Status status_;
};

struct InputError : Error {
  explicit InputError(const std::string& message) : Error(message, Status::input) {}
};
struct OutOfMemory : Error {
  explicit OutOfMemory(const std::string& message)
      : Error(
            "out of memory: " + message + "; reduce `batch`, increase `microbatches`, or use `recompute` or `offload`",
            Status::communication) {}
};
struct OutputError : Error {
  explicit OutputError(const std::string& message) : Error(message, Status::output) {}
};

struct NotCopied {
  NotCopied() = default;
  NotCopied(const NotCopied&) = delete;
  NotCopied& operator=(const NotCopied&) = delete;
};

// "; did you mean 'x'?" for the nearest entry of `known`, if it is a likely typo or another program's term for the same
// thing ("gpu", "fp16"); otherwise "".
std::string did_you_mean(std::string_view typed, const std::vector<std::string>& known);
std::string did_you_mean(std::string_view typed, std::span<const std::string_view> known);

// what() is "`microbatches`: expected a divisor of 12, got 5"; the command line shows backticked fields as options.

class FieldError : public Error {
 public:
  FieldError(std::string field, const std::string& message)
      : Error("`" + field + "`: " + message), field_(std::move(field)) {}
  const std::string& field() const { return field_; }

 private:
  std::string field_;
};

// For enums with an array of names in the order of their values. nullopt if no value has the name.
template <class Enum, size_t n>
constexpr std::optional<Enum> value_named(const std::array<std::string_view, n>& names, std::string_view name) {
  for (size_t i = 0; i < n; ++i)
    if (names[i] == name) return static_cast<Enum>(i);
  return std::nullopt;
}

template <class Rows>
constexpr auto row_names(const Rows& rows) {
  std::array<std::string_view, std::tuple_size_v<Rows>> names;
  for (size_t i = 0; i < names.size(); ++i) names[i] = rows[i].name;
  return names;
}
// "direct, ring or tree", for messages.
std::string alternatives(std::span<const std::string_view> names);

template <class Enum, size_t n>
constexpr std::string_view name_in(const std::array<std::string_view, n>& names, Enum value) {
  return names.at(static_cast<size_t>(value));
}

}  // namespace tessera
