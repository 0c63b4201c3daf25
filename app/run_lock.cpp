// A file under flock().
#include "app/run_lock.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <random>

#include "data/files.h"
#include "tensor/error.h"
#include "tensor/file_system.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

fs::path lock_of(const fs::path& run) { return run / "lock"; }

// True while the name still leads to the file that was opened.
bool is_at(const fs::path& file, int fd) {
  struct stat opened {
  }, named{};
  return ::fstat(fd, &opened) == 0 && ::lstat(file.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
         opened.st_dev == named.st_dev;
}

std::string owner_text() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  std::random_device random;
  return fmt::format("process {} on {} since {:%Y-%m-%d %H:%M:%S} ({:08x}{:08x})\n", ::getpid(), host.data(),
                     fmt::localtime(std::time(nullptr)), random(), random());
}

}  // namespace

RunLock::RunLock(const fs::path& run) : run_(run) {
  const fs::path file = lock_of(run);
  fd_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
  if (fd_ < 0) throw OutputError(fmt::format("cannot write {}: {}", file.string(), std::strerror(errno)));
  const int cause = ::flock(fd_, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
  if (is_unknown_operation(cause)) {
    note_ = fmt::format("{} cannot be locked ({}): no other run may write there; this one ends where it meets another",
                        run.string(), std::strerror(cause));
  } else if (cause != 0) {
    ::close(fd_);
    if (cause != EWOULDBLOCK) throw OutputError(fmt::format("cannot lock {}: {}", file.string(), std::strerror(cause)));
    const std::string owner = read(run);
    throw Error(fmt::format("--out: {} is being written by another run, {}; expected a folder that no run writes to",
                            run.string(), owner.empty() ? "which has just begun" : owner.substr(0, owner.find(" ("))));
  }
  text_ = owner_text();
  if (::ftruncate(fd_, 0) == 0 && ::pwrite(fd_, text_.data(), text_.size(), 0) == std::ssize(text_)) return;
  const int failed = errno;
  ::close(fd_);
  throw OutputError(fmt::format("cannot write {}: {}", file.string(), std::strerror(failed)));
}

RunLock::~RunLock() { ::close(fd_); }

void RunLock::check() const {
  if (!is_at(lock_of(run_), fd_))
    throw OutputError(
        fmt::format("{}: the run's folder was removed, moved or replaced while the run wrote to it", run_.string()));
  if (!note_.empty() && read_file(lock_of(run_)) != text_)
    throw OutputError(fmt::format("{} is being written by another run, {}", run_.string(), read(run_)));
}

std::string RunLock::read(const fs::path& run) {
  const std::string text = read_file(lock_of(run));
  return text.substr(0, text.find('\n'));
}

}  // namespace tessera
