// A fuzz target, and the registry to which each tests/fuzz/NAME_target.cpp adds its target.
//
// Targets are built twice: as fuzz_NAME with libFuzzer, and all together in the regular test suite, which replays
// tests/fuzz/corpus/NAME. A new target therefore consists of one file and its corpus.
//
//   mkdir found
//   build/asan/bin/fuzz_NAME -runs=10000000 -max_len=4096 -rss_limit_mb=2048 found tests/fuzz/corpus/NAME
#pragma once
#include <algorithm>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "base/error.h"

namespace tessera::fuzz {

inline constexpr const char* kWhat = "the input";  // the name of the bytes in errors

// Parses bytes and checks the parser's invariants on accepted input. Throws Error if the bytes are rejected; any other
// exception is a finding.
using Parse = void (*)(std::string_view bytes);

inline std::map<std::string, Parse>& targets() {
  static std::map<std::string, Parse> all;
  return all;
}

// A constant of this type in a target's file registers the target before main() begins.
struct Target {
  Target(const std::string& name, Parse parse) { targets()[name] = parse; }
};

inline void require(bool held, const std::string& promise) {
  if (!held) throw std::logic_error("a promise is broken: " + promise);
}

// Removes the part of an input before `between`, and `between`, and returns that part.
inline std::string_view take(std::string_view& bytes, std::string_view between = "\n%\n") {
  const size_t end = std::min(bytes.find(between), bytes.size());
  const std::string_view part = bytes.substr(0, end);
  bytes.remove_prefix(std::min(end + between.size(), bytes.size()));
  return part;
}

// Prepends the input's name to errors that name only a field.
template <class Refusal = Error, class F>
void named(const F& parse) {
  try {
    parse();
  } catch (const Refusal& e) {
    throw InputError(std::string(kWhat) + ": " + e.what());
  }
}

inline std::span<const std::byte> as_bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

// Whether the target accepts the bytes. An error must be one line that names them.
inline bool accepts(Parse parse, std::string_view bytes) {
  try {
    parse(bytes);
    return true;
  } catch (const Error& e) {
    const std::string_view message = e.what();
    require(message.find(kWhat) != std::string_view::npos, "a message names the input: " + std::string(message));
    require(message.find_first_of("\n\x1b") == std::string_view::npos, "a message is one line without controls");
    require(message.size() < 9000, "a message is not endless");
    return false;
  }
}

}  // namespace tessera::fuzz
