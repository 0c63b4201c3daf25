// Writing beside a name, or into what has it.
#include "tensor/write_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "tensor/error.h"
#include "tensor/temporary.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void refuse(const fs::path& file, int cause) {
  throw OutputError("cannot write " + file.string() + ": " + std::strerror(cause));
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

// Closes `fd`; 0 or an errno.
int write_and_close(int fd, std::span<const std::string_view> parts, bool flush) {
  const auto write_part = [&](std::string_view part) { return write_all(fd, part); };
  const bool ok = std::ranges::all_of(parts, write_part) && (!flush || ::fsync(fd) == 0);
  const int cause = ok ? 0 : errno;
  return ::close(fd) == 0 || !ok ? cause : errno;
}

// Standard output or error where it is the same file, else what has the name; negative where it is to be replaced.
int open_in_place(const fs::path& file) {
  struct stat there {};
  if (::stat(file.c_str(), &there) != 0) return -1;
  for (const int standard : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat own {};
    if (::fstat(standard, &own) == 0 && own.st_dev == there.st_dev && own.st_ino == there.st_ino)
      return ::fcntl(standard, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  }
  if (S_ISREG(there.st_mode)) return -1;
  const int fd = ::open(file.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
  if (fd < 0) refuse(file, errno);
  return fd;
}

// Where a chain of symbolic links ends, whether something is there or not.
fs::path followed(fs::path file) {
  std::error_code error;
  for (int links = 0; fs::is_symlink(fs::symlink_status(file, error)); ++links) {
    const fs::path target = fs::read_symlink(file, error);
    if (error) refuse(file, error.value());
    if (links == 40) refuse(file, ELOOP);
    file = file.parent_path() / target;
  }
  return file;
}

}  // namespace

bool write_file(const fs::path& file, std::span<const std::string_view> parts) {
  if (const int there = open_in_place(file); there >= 0) {
    if (const int cause = write_and_close(there, parts, false)) refuse(file, cause);
    return false;
  }
  const fs::path name = followed(file);
  const TemporaryName beside(name);
  const int made = ::open(beside.path().c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
  if (made < 0) refuse(file, errno);
  if (const int cause = write_and_close(made, parts, true)) refuse(file, cause);
  if (::rename(beside.path().c_str(), name.c_str()) != 0) refuse(file, errno);
  return true;
}

}  // namespace tessera
