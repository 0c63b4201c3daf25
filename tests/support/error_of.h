// The error of what must not be, as text.
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "tensor/error.h"

namespace tessera::test {

inline std::string error_of(const std::function<void()>& f, Status status = Status::usage) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), status) << e.what();
    return e.what();
  }
  return "nothing was thrown";
}

}  // namespace tessera::test
