// Mapping, and a table of what is mapped.
#include "data/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "tensor/error.h"
#include "tensor/file_system.h"

namespace tessera {
namespace fs = std::filesystem;
namespace {

// What a handler can read: of fixed size, and complete before its place is known.
struct Mapped {
  std::atomic<bool> taken{false};
  std::atomic<const std::byte*> begin{nullptr};
  size_t size = 0;
  std::array<char, 512> name{};
};
std::array<Mapped, 64> table;  // what finds no room in it is not named

void enter(const std::byte* begin, size_t size, const std::string& name) {
  for (Mapped& m : table) {
    if (m.taken.exchange(true)) continue;
    m.size = size;
    m.name[name.copy(m.name.data(), m.name.size() - 1)] = '\0';
    m.begin = begin;
    return;
  }
}

void leave(const std::byte* begin) {
  for (Mapped& m : table)
    if (m.begin == begin) {
      m.begin = nullptr;
      m.taken = false;
    }
}

// The bytes of a file in memory of our own, for a file system that maps none; MAP_FAILED and errno where they cannot be
// had.
void* read_whole(int fd, size_t size) {
  void* const map = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  for (size_t done = 0; map != MAP_FAILED && done < size;) {
    const ssize_t n = ::pread(fd, static_cast<char*>(map) + done, size - done, static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const int cause = n < 0 ? errno : EIO;  // it was cut short
      ::munmap(map, size);
      errno = cause;
      return MAP_FAILED;
    }
    done += static_cast<size_t>(n);
  }
  return map;
}

}  // namespace

MappedFile::MappedFile(const fs::path& file) {
  const int fd = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat info {};
  const bool known = fd >= 0 && ::fstat(fd, &info) == 0;
  const bool regular = known && S_ISREG(info.st_mode);
  void* map = MAP_FAILED;
  if (regular && info.st_size > 0)
    map = ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  const bool mapped = map != MAP_FAILED;
  if (regular && info.st_size > 0 && !mapped && is_unknown_operation(errno))
    map = read_whole(fd, static_cast<size_t>(info.st_size));
  const int cause = errno;
  if (fd >= 0) ::close(fd);
  if (!known) throw InputError(fmt::format("cannot open {}: {}", file.string(), std::strerror(cause)));
  if (!regular) throw InputError(fmt::format("{} is not a regular file", file.string()));
  if (info.st_size == 0) return;
  if (map == MAP_FAILED) throw InputError(fmt::format("cannot map {}: {}", file.string(), std::strerror(cause)));
  data_ = static_cast<const std::byte*>(map);
  size_ = static_cast<size_t>(info.st_size);
  if (mapped) enter(data_, size_, file.string());
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  leave(data_);
  ::munmap(const_cast<std::byte*>(data_), size_);
}

const char* mapped_file_at(const void* address) {
  const auto* const at = static_cast<const std::byte*>(address);
  for (const Mapped& m : table)
    if (const std::byte* const begin = m.begin; begin != nullptr && at >= begin && at < begin + m.size)
      return m.name.data();
  return nullptr;
}

}  // namespace tessera
