// Errors with a formatted message. By convention, a parameter `what` names the input in errors.
#pragma once
#include <fmt/format.h>

#include <utility>

#include "base/error.h"

namespace tessera {

template <class... Values>
[[noreturn]] void bad_input(fmt::format_string<Values...> text, Values&&... values) {
  throw InputError(fmt::format(text, std::forward<Values>(values)...));
}
// Throws Error (usage).
template <class... Values>
[[noreturn]] void bad_usage(fmt::format_string<Values...> text, Values&&... values) {
  throw Error(fmt::format(text, std::forward<Values>(values)...));
}

}  // namespace tessera
