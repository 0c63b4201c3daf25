// Running another program.
#pragma once
#include <sys/types.h>

#include <filesystem>

#include "tensor/error.h"

namespace tessera {

struct ProgramResult {
  int status = 0;           // its exit status; 127 if it was not found, 124 if it took too long, 128 + n for signal n
  std::string last_line;    // the last line that it wrote, standard output and standard error together
  std::string output = {};  // both, at least the last 64 KiB
};

// Runs a program, found through PATH, in a directory, without a shell and with nothing on its standard input; it and
// its children are killed after `timeout_seconds`.
ProgramResult run_program(const std::vector<std::string>& command, const std::filesystem::path& directory,
                          int timeout_seconds);

// Kills what run_program() is waiting for, for a process that ends at once; nothing is started any more.
void kill_running_programs();

// A program that goes on beside this one, in a process group of its own, with this one's standard output and standard
// error and nothing on its standard input. When this process ends, however that ends, it gets SIGTERM. From then on
// what loses its parent below this process becomes this one's child, so that nothing started can outlive end_rest().
class StartedProgram : NotCopied {
 public:
  // Found through PATH, by the main thread. Throws Error when it cannot be started.
  explicit StartedProgram(const std::vector<std::string>& command);
  ~StartedProgram();  // kills it

  // Its exit status once it has ended, 128 + n for signal n.
  std::optional<int> ended();
  void signal(int number) const;  // to its group
  // Ends what has lost its parent, such as ranks of an mpirun that was killed: SIGTERM, and SIGKILL after so many
  // seconds. Returns how many there were.
  static int end_rest(double seconds);

 private:
  pid_t child_ = 0;  // 0: it has ended
};

}  // namespace tessera
