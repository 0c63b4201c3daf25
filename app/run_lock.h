// A run's folder has one writer at a time, who holds the file `lock` in it. The system gives a lock back when a process
// ends, however that ends.
#pragma once
#include <filesystem>
#include <string>

namespace tessera {

class RunLock {
 public:
  // Throws Error (usage) naming the process that writes to the folder. Where the file system has no locks, note() says
  // so.
  explicit RunLock(const std::filesystem::path& run);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  // Throws OutputError when the folder is not where it was: removed, moved, or another one in its place; and where
  // there are no locks, when another run has begun to write to it.
  void check() const;
  // Tells a user what is unusual about the lock; mostly empty.
  const std::string& note() const { return note_; }

  // What the lock of a folder says of who holds it; it differs between any two. Throws InputError.
  static std::string read(const std::filesystem::path& run);

 private:
  std::filesystem::path run_;
  std::string text_, note_;
  int fd_ = -1;
};

}  // namespace tessera
