// What is being written has a name of its own until it is whole: NAME.tmp-PID-HOST-RANDOM, beside the name that it will
// have. It is removed at the end of its scope, by remove_temporaries() when a signal ends the process, and, where the
// process was killed, by the next one that calls remove_stale() there.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

namespace tessera {

class TemporaryName {
 public:
  // A name that nobody can foretell, `stem` and its end; nothing is made. The caller makes it with O_EXCL or mkdir().
  explicit TemporaryName(const std::filesystem::path& stem);
  // Removes what has the name, a folder with all in it.
  ~TemporaryName();
  TemporaryName(const TemporaryName&) = delete;
  TemporaryName& operator=(const TemporaryName&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Removes all that this process is writing. For a process that ends at once: a thread that begins or ends to write
// something afterwards waits for ever.
void remove_temporaries();

// Removes what processes that are no more have left in a directory, and returns it. A process of another host cannot be
// asked whether it lives: what it writes counts as left when it is a day old, or at once where the directory is `ours`
// alone.
std::vector<std::filesystem::path> remove_stale(const std::filesystem::path& directory, bool ours);

// The folder for temporary files: $TMPDIR, or /tmp. Throws OutputError when it is none.
std::filesystem::path temporary_folder();

}  // namespace tessera
