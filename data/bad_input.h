// Refusing an input with a line that is made in place.
#pragma once
#include <fmt/format.h>

#include "tensor/error.h"

namespace tessera {

// Throws InputError with this text, as fmt::format() makes it.
template <class... Values>
[[noreturn]] void bad_input(fmt::format_string<Values...> text, Values&&... values) {
  throw InputError(fmt::format(text, std::forward<Values>(values)...));
}

}  // namespace tessera
