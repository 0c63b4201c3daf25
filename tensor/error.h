// Exceptions and exit statuses.
//
// A message is one line of at most 1,000 bytes with control characters escaped; it names the option, key, file, tensor
// or rank, the expected and the actual value. Ops prefix their name: `[matmul] inner dims differ: a (4, 8) x b (6, 3);
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
#include <utility>
#include <vector>

namespace tessera {

enum class Status {
  verification = 1,   // a contract check failed
  usage = 2,          // invalid command line, configuration or plan
  communication = 3,  // a rank or its communication failed
  input = 4,          // an input file is missing, malformed or fails its checksum
  not_finite = 5,     // the loss is not finite
  output = 6,         // writing failed
};

// Escapes control characters as `\x1b` and elides the middle of a long message.
std::string one_line(const std::string& message);
// Escapes control characters except line breaks and tabs, so that text from files or peers cannot control a terminal.
std::string for_terminal(std::string_view text);

// Throws Error("WHAT: expected an object, got null") if `object` is null. It is compiled separately, so that no
// compiler removes the check for the address of a reference.
void require_object(const void* object, const char* what);
// Throws Error("[FUNCTION] expected EXPECTED, got GOT").
[[noreturn]] void reject(const char* function, const std::string& expected, const std::string& got);
// The index; throws Error("[FUNCTION] expected WHAT below COUNT, got INDEX") unless 0 <= index < count.
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
// The message suggests options that reduce memory.
struct OutOfMemory : Error {
  explicit OutOfMemory(const std::string& message)
      : Error("out of memory: " + message +
                  "; a smaller `batch`, more `microbatches`, `recompute` or `offload` need less",
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

// Strict UTF-8: no overlong forms, no surrogates, nothing beyond U+10FFFF.

// Returns the code point at `position` and advances past it; nullopt, without advancing, if the bytes are not UTF-8.
std::optional<char32_t> next_code_point(std::string_view bytes, size_t& position);

// Appends `\xe9` for a byte of invalid UTF-8 or an invisible character.
void append_escaped(std::string& out, char byte);

// "; did you mean 'x'?" for the nearest entry of `known`, if it is a likely typo or another program's term for the same
// thing ("gpu", "fp16"); otherwise "".
std::string did_you_mean(std::string_view typed, const std::vector<std::string>& known);
std::string did_you_mean(std::string_view typed, std::span<const std::string_view> known);

// what() is "`microbatches`: expected a divisor of 12, got 5". In library messages backticks mark field names; the
// command line shows them as options.

class FieldError : public Error {
 public:
  FieldError(std::string field, const std::string& message)
      : Error("`" + field + "`: " + message), field_(std::move(field)) {}
  const std::string& field() const { return field_; }

 private:
  std::string field_;
};

// Enums with named values: each has an array of names in the order of its values.

// value_named<Algorithm>(kAlgorithmNames, "ring"); nullopt if no value has the name.
template <class Enum, size_t n>
constexpr std::optional<Enum> value_named(const std::array<std::string_view, n>& names, std::string_view name) {
  for (size_t i = 0; i < n; ++i)
    if (names[i] == name) return static_cast<Enum>(i);
  return std::nullopt;
}

template <class Enum, size_t n>
constexpr std::string_view name_in(const std::array<std::string_view, n>& names, Enum value) {
  return names.at(static_cast<size_t>(value));
}

}  // namespace tessera
