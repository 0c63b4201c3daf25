// Files: read, and written whole or not at all.
#pragma once
#include <cstdint>
#include <filesystem>

#include "tensor/error.h"
#include "tensor/memory_limit.h"

namespace tessera {

// A descriptor of a file or a socket, which is closed at its end.
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

// A regular file that is open for reading, which may be written to or cut short meanwhile.
class OpenFile {
 public:
  // Throws InputError when it is missing, unreadable or something else than a file.
  explicit OpenFile(const std::filesystem::path& file);
  // When it was opened.
  int64_t size() const { return size_; }
  // The bytes from `at`. Throws InputError when they are not there.
  void read(int64_t at, std::span<std::byte> out) const;
  int descriptor() const { return fd_.get(); }

 private:
  std::filesystem::path file_;
  Descriptor fd_;
  int64_t size_;
};

// All bytes of a regular file. Throws InputError like OpenFile, and if there are more than `most` or more than the
// memory allows for a text that takes `growth` times as many bytes while it is parsed.
std::string read_whole(const std::filesystem::path& file, int64_t most = int64_t{1} << 30,
                       int64_t growth = kParsedGrowth);

// All that a folder holds, in no order; nothing of one that cannot be read.
std::vector<std::filesystem::path> list_entries(const std::filesystem::path& folder);

// Throws OutputError, which says why by an errno.
[[noreturn]] void cannot_write(const std::filesystem::path& file, int cause);

// Writes a file beside `file`, flushes it to disk and renames it, so that `file` is whole or absent. A symbolic link is
// followed: the file that it leads to is written, beside that one. A pipe or a device, and the file that is this
// process's standard output or error, are not replaced but written to. Returns whether `file` has become a file of
// its own. Throws OutputError.
bool write_file(const std::filesystem::path& file, std::span<const std::string_view> parts);
inline bool write_file(const std::filesystem::path& file, std::string_view first, std::string_view second = {}) {
  const std::string_view parts[] = {first, second};
  return write_file(file, parts);
}

// Operations of files that some file systems do not know: NFS, Lustre, FUSE, and those of containers and of other
// systems' disks (docs/cluster.md).

// True of an errno by which a file system says that it does not know an operation, rather than that it failed.
bool is_unknown_operation(int cause);

// Makes sure that the disk has room for the bytes of a file from `from` to `to`, which nobody has written yet. Where
// the file system cannot promise it, zeros are written there. Returns 0 or an errno.
int make_room(int descriptor, int64_t from, int64_t to);

// A file or folder that is being written has a name of its own until it is whole: NAME.tmp-PID-HOST-RANDOM, beside the
// name that it will have. It is removed at the end of its scope, by remove_temporaries() when a signal ends the
// process, and, where the process was killed, by the next one that calls remove_stale() there.

class TemporaryName : NotCopied {
 public:
  // A name that nobody can foretell, `stem` and its end; nothing is made. The caller makes it with O_EXCL or mkdir().
  explicit TemporaryName(const std::filesystem::path& stem);
  // Removes what has the name, a folder with all in it.
  ~TemporaryName();
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
