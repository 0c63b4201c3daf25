// InputError with a formatted message. In data/ and hub/, a parameter `what` names the source in errors.
#pragma once
#include <fmt/format.h>

#include "tensor/error.h"

namespace tessera {

template <class... Values>
[[noreturn]] void bad_input(fmt::format_string<Values...> text, Values&&... values) {
  throw InputError(fmt::format(text, std::forward<Values>(values)...));
}

}  // namespace tessera
