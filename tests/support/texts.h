// Expected contents of texts.
#pragma once
#include <gtest/gtest.h>

#include <experimental/source_location>
#include <initializer_list>
#include <string_view>

namespace tessera {

using Place = std::experimental::source_location;  // of a call; clang 14 has no std::source_location

// Expects a text that contains all parts.
inline void expect_has(std::string_view text, std::initializer_list<std::string_view> parts,
                       Place at = Place::current()) {
  for (const std::string_view part : parts)
    if (text.find(part) == text.npos)
      ADD_FAILURE_AT(at.file_name(), static_cast<int>(at.line())) << "no '" << part << "' in " << text;
}
inline void expect_has(std::string_view text, std::string_view part, Place at = Place::current()) {
  expect_has(text, {part}, at);
}

// Expects a text that contains none of the parts.
inline void expect_lacks(std::string_view text, std::initializer_list<std::string_view> parts,
                         Place at = Place::current()) {
  for (const std::string_view part : parts)
    if (text.find(part) != text.npos)
      ADD_FAILURE_AT(at.file_name(), static_cast<int>(at.line())) << "'" << part << "' in " << text;
}
inline void expect_lacks(std::string_view text, std::string_view part, Place at = Place::current()) {
  expect_lacks(text, {part}, at);
}

}  // namespace tessera
