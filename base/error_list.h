// Collects errors: independent checks all run, and the user sees every failure at once.
//
//   ErrorList errors;
//   errors.check([&] { check_batch(plan); });
//   errors.check([&] { check_heads(model); });
//   errors.raise();
#pragma once
#include <algorithm>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace tessera {

// what() is the first message.
class AggregateError {
 public:
  explicit AggregateError(std::vector<std::string> messages) : messages_(std::move(messages)) {}
  virtual ~AggregateError() = default;
  const std::vector<std::string>& messages() const { return messages_; }

 private:
  std::vector<std::string> messages_;
};
class Errors : public Error, public AggregateError {
 public:
  Errors(const std::vector<std::string>& messages, Status status)
      : Error(messages.front(), status), AggregateError(messages) {}
};
class FieldErrors : public FieldError, public AggregateError {
 public:
  FieldErrors(const FieldError& first, std::vector<std::string> messages)
      : FieldError(first), AggregateError(std::move(messages)) {}
};

inline std::vector<std::string> error_messages(const Error& e) {
  if (const auto* several = dynamic_cast<const AggregateError*>(&e)) return several->messages();
  return {e.what()};
}

class ErrorList {
 public:
  template <class F>
  void check(const F& f) {
    try {
      f();
    } catch (const Error& e) {
      add(e);
    }
  }
  // Adds the exception currently being handled.
  void add(const Error& e) {
    if (!first_) first_ = std::current_exception(), status_ = e.status();
    for (const std::string& message : error_messages(e))
      if (std::ranges::none_of(messages_, [&](const std::string& m) { return subject(m) == subject(message); }))
        messages_.push_back(message);
  }
  bool none() const { return messages_.empty(); }
  // Throws a single error unchanged. Throws several as FieldErrors if the first is a FieldError, otherwise as Errors
  // with the status of the first.
  void raise() const {
    if (none()) return;
    try {
      std::rethrow_exception(first_);
    } catch (const FieldError& e) {
      if (messages_.size() > 1) throw FieldErrors(e, messages_);
      throw;
    } catch (const Error&) {
      if (messages_.size() > 1) throw Errors(messages_, status_);
      throw;
    }
  }

 private:
  // The option, field or file at the start of a message; of several errors with the same subject, only the first is
  // reported.
  static std::string_view subject(std::string_view message) { return message.substr(0, message.find(": ")); }

  std::vector<std::string> messages_;
  std::exception_ptr first_;
  Status status_ = Status::usage;
};

}  // namespace tessera
