// Packed answers: bytes that go from the process that has a learner's code to the grader.
//
// Numbers and plain structs go as they lie in memory, lists as their length and their elements, and a struct with lists
// in it field by field: its fields() names them.
#pragma once
#include <cstring>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tensor/error.h"

namespace tessera::lab {

struct NoAnswer : Error {
  NoAnswer() : Error("what came back is no answer to what was asked") {}
};

template <class T>
void pack(std::string& to, T& x) {
  if constexpr (std::is_trivially_copyable_v<T>) {
    to.append(reinterpret_cast<const char*>(&x), sizeof(x));
  } else if constexpr (requires { x.fields(); }) {
    std::apply([&](auto&... field) { (pack(to, field), ...); }, x.fields());
  } else {
    size_t count = x.size();
    pack(to, count);
    for (auto& element : x) pack(to, element);
  }
}

// Takes an object from the beginning of the bytes. Throws NoAnswer where they end too early.
template <class T>
T take(std::string_view& from) {
  T x{};
  if constexpr (std::is_trivially_copyable_v<T>) {
    if (from.size() < sizeof(x)) throw NoAnswer();
    std::memcpy(&x, from.data(), sizeof(x));
    from.remove_prefix(sizeof(x));
  } else if constexpr (requires { x.fields(); }) {
    std::apply([&](auto&... field) { ((field = take<std::decay_t<decltype(field)>>(from)), ...); }, x.fields());
  } else {
    for (auto count = take<size_t>(from); count > 0; --count) x.push_back(take<typename T::value_type>(from));
  }
  return x;
}

template <class T>
std::string packed(T x) {
  std::string out;
  pack(out, x);
  return out;
}

}  // namespace tessera::lab
