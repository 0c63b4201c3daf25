// Running other programs.
#pragma once
#include <sys/types.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"

namespace tessera {

struct ProgramResult {
  int status = 0;           // exit status; 127: not found, 124: timed out, 128 + n: killed by signal n
  std::string last_line;    // of standard output and standard error together
  std::string output = {};  // both; at least the last 64 KiB
};

// Runs a program found through PATH, without a shell and with an empty standard input; kills it and its children after
// `timeout_seconds`.
ProgramResult run_program(const std::vector<std::string>& command, const std::filesystem::path& directory,
                          int timeout_seconds);

// For a process about to exit: also prevents programs from starting.
void kill_running_programs();

// A concurrent program in a separate process group, with this process's standard output and error and an empty standard
// input. It receives SIGTERM when this process ends for any reason. From construction on, orphaned descendants are
// reparented to this process, so that end_rest() can terminate them all.
class StartedProgram : NotCopied {
 public:
  // Finds the program through PATH. Main thread only. Throws Error if it cannot be started.
  explicit StartedProgram(const std::vector<std::string>& command);
  ~StartedProgram();  // kills the program

  // Exit status, or 128 + n for signal n; empty until the program has ended.
  std::optional<int> ended();
  void signal(int number) const;  // to the process group
  // Terminates orphaned descendants, such as the ranks of a killed mpirun: SIGTERM, then SIGKILL after `seconds`.
  // Returns their number.
  static int end_rest(double seconds);

 private:
  pid_t child_ = 0;  // 0: ended
};

}  // namespace tessera
