// The one exception type of Tessera, and the exit status each kind of failure ends the program with.
//
// A message is one line that says which option, key, file, tensor or rank is meant, what was expected and what was
// found. It may quote what a user typed or a file holds, and stays one line of at most 1,000 bytes: nothing in it
// reaches the terminal as a command. Ops tag theirs: `[matmul] inner dims differ: a (4, 8) x b (6, 3); b must have 8
// rows`.
#pragma once
#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

enum class Status {
  verification = 1,   // a check of the contract failed
  usage = 2,          // the command line, the configuration or the plan is wrong
  communication = 3,  // a rank or its communication failed
  input = 4,          // an input file is missing, malformed or fails its checksum
  not_finite = 5,     // the loss is not finite
  output = 6,         // writing failed
};

// A message as it is shown: control characters as `\x1b`, and the middle of a long one left out.
std::string one_line(const std::string& message);
// A text of any length as a terminal may show it: line breaks and tabs stay, other control characters become `\x1b`, so
// no text from a model, a file, a name or a peer moves the cursor, clears the screen or sets the title.
std::string for_terminal(std::string_view text);

// Throws Error("WHAT: expected an object, got null") if `object` is null. Callers may pass the address of a reference
// parameter that a user made from a null pointer: the check is compiled apart, so that no compiler removes it.
void require_object(const void* object, const char* what);

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
// Says besides what a run does about it.
struct OutOfMemory : Error {
  explicit OutOfMemory(const std::string& message)
      : Error("out of memory: " + message +
                  "; a smaller `batch`, more `microbatches`, `recompute` or `offload` need less",
              Status::communication) {}
};
struct OutputError : Error {
  explicit OutputError(const std::string& message) : Error(message, Status::output) {}
};

// A base of classes whose objects are neither copied nor moved.
struct NotCopied {
  NotCopied() = default;
  NotCopied(const NotCopied&) = delete;
  NotCopied& operator=(const NotCopied&) = delete;
};

// UTF-8, strictly: no overlong forms, no surrogates, nothing beyond U+10FFFF.

// The code point at `position`, which is moved past it; nothing (and `position` stays) where the bytes are not UTF-8.
std::optional<char32_t> next_code_point(std::string_view bytes, size_t& position);

// Adds a byte as `\xe9`, for what is not UTF-8 or would not be seen.
void append_escaped(std::string& out, char byte);

// Suggestions for a name that does not exist: the one that the user may have meant.

// The entry of `known` nearest to `typed`, when it is near enough to be a slip of the finger or another program's word
// for it ("gpu", "fp16"), as "; did you mean 'x'?"; else nothing.
std::string did_you_mean(std::string_view typed, const std::vector<std::string>& known);
std::string did_you_mean(std::string_view typed, std::span<const std::string_view> known);

// The error of one field of what a program was told: what() is "`microbatches`: 5 do not divide a batch of 12". In
// every message of a library a name between backticks is a field's; the command line shows it as its option.

class FieldError : public Error {
 public:
  FieldError(std::string field, const std::string& message)
      : Error("`" + field + "`: " + message), field_(std::move(field)) {}
  const std::string& field() const { return field_; }

 private:
  std::string field_;
};

// Enums whose values have names: beside each stands an array of names, in the order of the values.

// The value of that name: value_named<Algorithm>(kAlgorithmNames, "ring"). Nothing where there is none.
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
