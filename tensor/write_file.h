// Files: reading, and atomic writing.
#pragma once
#include <cstdint>
#include <filesystem>

#include "tensor/error.h"

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

// A regular file open for reading; other processes may modify or truncate it at the same time.
class OpenFile {
 public:
  // Throws InputError if it is missing, unreadable or not a regular file.
  explicit OpenFile(const std::filesystem::path& file);
  // Size when it was opened.
  int64_t size() const { return size_; }
  // Reads the bytes starting at `at`. Throws InputError if the file is too short.
  void read(int64_t at, std::span<std::byte> out) const;
  int descriptor() const { return fd_.get(); }

 private:
  std::filesystem::path file_;
  Descriptor fd_;
  int64_t size_;
};

// All bytes of a regular file. Throws InputError like OpenFile, and if the file exceeds `most` bytes.
std::string read_whole(const std::filesystem::path& file, int64_t most = int64_t{1} << 30);

// All entries of a directory, unordered; empty if it cannot be read.
std::vector<std::filesystem::path> list_entries(const std::filesystem::path& folder);

// Throws OutputError with the message of an errno.
[[noreturn]] void cannot_write(const std::filesystem::path& file, int cause);

// Writes a temporary file next to `file`, flushes it to disk and renames it, so that `file` is either complete or
// absent. Follows symbolic links: the target is replaced. A pipe, a device, and a file that is this process's standard
// output or error are written to directly. Returns whether `file` was replaced. Throws OutputError.
bool write_file(const std::filesystem::path& file, std::span<const std::string_view> parts);
inline bool write_file(const std::filesystem::path& file, std::string_view first, std::string_view second = {}) {
  const std::string_view parts[] = {first, second};
  return write_file(file, parts);
}

// File operations that some file systems do not support: NFS, Lustre, FUSE, and file systems of containers or other
// operating systems (docs/cluster.md).

// True for an errno that reports an unsupported operation rather than a failure.
bool is_unknown_operation(int cause);

// Reserves disk space for bytes [from, to) of a file, which must not have been written yet. If the file system does not
// support reservation, writes zeros. Returns 0 or an errno.
int make_room(int descriptor, int64_t from, int64_t to);

// A file or directory that is being written has a temporary name next to its final one: NAME.tmp-PID-HOST-RANDOM. It is
// removed at the end of its scope, by remove_temporaries() if a signal ends the process, and, if the process was
// killed, by the next process that calls remove_stale() in that directory.

class TemporaryName : NotCopied {
 public:
  // An unpredictable name that begins with `stem`; creates nothing. The caller creates it with O_EXCL or mkdir().
  explicit TemporaryName(const std::filesystem::path& stem);
  // Removes the file or directory with its contents.
  ~TemporaryName();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Removes all temporary files of this process. For a process that exits immediately: a thread that starts or ends a
// write afterwards blocks forever.
void remove_temporaries();

// Removes files left behind by dead processes in `directory` and returns their paths. Whether a process of another host
// is alive is unknown: its files count as stale after one day, or at once if the directory is `ours`, that is, used by
// this run only.
std::vector<std::filesystem::path> remove_stale(const std::filesystem::path& directory, bool ours);

// Directory for temporary files: $TMPDIR, or /tmp. Throws OutputError if that is not a directory.
std::filesystem::path temporary_folder();

}  // namespace tessera
