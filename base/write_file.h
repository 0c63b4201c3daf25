// Files: reading, and atomic writing.
#pragma once
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/memory_limit.h"

namespace tessera {

// An owned file or socket descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Other processes may modify or truncate an open file.
class OpenFile {
 public:
  // Throws InputError for anything but a readable regular file.
  explicit OpenFile(const std::filesystem::path& file);
  int64_t size() const { return size_; }
  // Throws InputError if the file is too short.
  void read(int64_t at, std::span<std::byte> out) const;
  int descriptor() const { return fd_.get(); }

 private:
  std::filesystem::path file_;
  Descriptor fd_;
  int64_t size_;
};

// Throws InputError like OpenFile, if the file exceeds `limit` bytes, and if the memory for parsing it, `growth` times
// its size, is not available.
std::string read_full(const std::filesystem::path& file, int64_t limit = int64_t{1} << 30,
                      int64_t growth = kParsedGrowth);

// Unordered; empty if the directory cannot be read.
std::vector<std::filesystem::path> list_entries(const std::filesystem::path& directory);

[[noreturn]] void cannot_write(const std::filesystem::path& file, int cause);

// Writes a temporary file next to `file`, flushes it to disk and renames it, so that `file` is complete or absent.
// Follows symbolic links; writes in place to pipes, devices and the process's standard output or error. Returns whether
// `file` was replaced. Throws OutputError.
bool write_file(const std::filesystem::path& file, std::span<const std::string_view> chunks);
inline bool write_file(const std::filesystem::path& file, std::string_view first, std::string_view second = {}) {
  const std::string_view chunks[] = {first, second};
  return write_file(file, chunks);
}

// Whether an errno reports an operation unsupported by the file system, as on NFS, Lustre, FUSE or in containers
// (docs/cluster.md).
bool is_unknown_operation(int cause);

// Reserves disk space for bytes [from, to) of a file before they are written, with zeros if necessary. Returns 0 or an
// errno.
int reserve_space(int descriptor, int64_t from, int64_t to);

// A file or directory is written under a temporary name, NAME.tmp-PID-HOST-RANDOM. The temporary is removed at the end
// of its scope, by remove_temporaries() after a signal, or, if the process was killed, by another process's
// remove_stale().

class TemporaryName : NotCopied {
 public:
  // The name is unpredictable; the caller creates the file with O_EXCL or mkdir().
  explicit TemporaryName(const std::filesystem::path& stem);
  ~TemporaryName();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// For a process about to exit: a thread that starts or ends a write afterwards blocks forever.
void remove_temporaries();

// Removes files of dead processes and returns their paths. Files of other hosts are stale after one day, or immediately
// if only this run uses the directory (`ours`).
std::vector<std::filesystem::path> remove_stale(const std::filesystem::path& directory, bool ours);

// $TMPDIR, or /tmp. Throws OutputError if it is not a directory.
std::filesystem::path temporary_directory();

}  // namespace tessera
