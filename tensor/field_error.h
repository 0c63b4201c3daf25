// The error of one field of what a program was told: what() is "`microbatches`: 5 do not divide a batch of 12". In
// every message of a library a name between backticks is a field's; the command line shows it as its option.
#pragma once
#include <string>
#include <utility>

#include "tensor/error.h"

namespace tessera {

class FieldError : public Error {
 public:
  FieldError(std::string field, const std::string& message)
      : Error("`" + field + "`: " + message), field_(std::move(field)) {}
  const std::string& field() const { return field_; }

 private:
  std::string field_;
};

}  // namespace tessera
