// Enums whose values have names: beside each stands an array of names, in the order of the values.
#pragma once
#include <array>
#include <cstddef>
#include <optional>
#include <string_view>

namespace tessera {

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
