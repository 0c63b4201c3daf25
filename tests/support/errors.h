// Expected errors.
#pragma once
#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <string_view>

#include "base/error.h"

namespace tessera {

// Whether a text contains this part; prints both on failure.
inline testing::AssertionResult has(std::string_view text, std::string_view part) {
  return testing::AssertionResult(text.find(part) != std::string_view::npos) << "'" << part << "' in " << text;
}

// Expects a one-line Error with this status that contains all parts.
template <class F>
void expect_error(Status status, std::initializer_list<std::string> parts, F&& action) {
  try {
    action();
  } catch (const Error& e) {
    const std::string message = e.what();
    EXPECT_EQ(static_cast<int>(e.status()), static_cast<int>(status)) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    for (const std::string& part : parts) EXPECT_TRUE(has(message, part));
    return;
  }
  FAIL() << "no error; one with '" << (parts.size() > 0 ? *parts.begin() : "") << "' was expected";
}

// Message of the Error thrown by an action, which must have this status.
template <class F>
std::string error_message(F&& action, Status status = Status::usage) {
  try {
    action();
  } catch (const Error& e) {
    EXPECT_EQ(static_cast<int>(e.status()), static_cast<int>(status)) << e.what();
    return e.what();
  }
  return "nothing was thrown";
}

}  // namespace tessera
