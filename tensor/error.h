// The one exception type of Tessera, and the exit status each kind of failure ends the program with.
//
// A message is one line that says which option, key, file, tensor or rank is meant, what was expected and what was
// found. It may quote what a user typed or a file holds, and stays one line of at most 1,000 bytes: nothing in it
// reaches the terminal as a command. Ops tag theirs: `[matmul] inner dims differ: a (4, 8) x b (6, 3); b must have 8
// rows`.
#pragma once
#include <stdexcept>
#include <string>

namespace tessera {

enum class Status {
  verification = 1,   // a check of the contract failed
  usage = 2,          // the command line, the configuration or the plan is wrong
  communication = 3,  // a rank or its communication failed
  input = 4,          // an input file is missing, malformed or fails its checksum
  not_finite = 5,     // the loss is not finite
  output = 6,         // writing failed
};

// A message as it is shown: control characters as `\x1b`, and the middle of a long one left out.
std::string one_line(const std::string& message);

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, Status status = Status::usage)
      : std::runtime_error(one_line(message)), status_(status) {}
  Status status() const { return status_; }

 private:
  Status status_;
};

struct InputError : Error {
  explicit InputError(const std::string& message) : Error(message, Status::input) {}
};
// Says besides what a run does about it.
struct OutOfMemory : Error {
  explicit OutOfMemory(const std::string& message)
      : Error("out of memory: " + message +
                  "; a smaller `batch`, more `microbatches`, `recompute` or `offload` need less",
              Status::communication) {}
};
struct OutputError : Error {
  explicit OutputError(const std::string& message) : Error(message, Status::output) {}
};

}  // namespace tessera
