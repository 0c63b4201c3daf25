// Whole files, checksums and the cache directory.
#include "data/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "tensor/error.h"
#include "tensor/write_file.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

// Closes a file descriptor at the end of the scope.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// O_NONBLOCK: opening a FIFO must not wait for its writer.
constexpr int kToRead = O_RDONLY | O_CLOEXEC | O_NONBLOCK;

// The size of a file that was opened, or not. Throws when it is missing, unreadable or something else than a file.
size_t regular_size(const Descriptor& in, const fs::path& file) {
  if (in.get() < 0) throw InputError(fmt::format("cannot open {}: {}", file.string(), std::strerror(errno)));
  struct stat info {};
  if (::fstat(in.get(), &info) != 0)
    throw InputError(fmt::format("cannot read {}: {}", file.string(), std::strerror(errno)));
  if (S_ISDIR(info.st_mode)) throw InputError(fmt::format("{} is a directory; expected a file", file.string()));
  if (!S_ISREG(info.st_mode))
    throw InputError(fmt::format("{} is not a regular file (a pipe or a device); expected a file", file.string()));
  return static_cast<size_t>(info.st_size);
}

// At most `bytes`; 0 at the end.
size_t read_some(const Descriptor& in, const fs::path& file, void* to, size_t bytes) {
  ssize_t n = 0;
  do n = ::read(in.get(), to, bytes);
  while (n < 0 && errno == EINTR);
  if (n < 0) throw InputError(fmt::format("cannot read {}: {}", file.string(), std::strerror(errno)));
  return static_cast<size_t>(n);
}

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

}  // namespace

std::string read_file(const fs::path& file) {
  const Descriptor in(::open(file.c_str(), kToRead));
  std::string bytes(regular_size(in, file), '\0');
  for (size_t done = 0; done < bytes.size();) {
    const size_t n = read_some(in, file, bytes.data() + done, bytes.size() - done);
    if (n == 0)
      throw InputError(fmt::format("{} shrank while it was read: {} of {} bytes", file.string(), done, bytes.size()));
    done += n;
  }
  return bytes;
}

void read_pieces(const fs::path& file, const std::function<void(std::span<const std::byte>)>& f) {
  const Descriptor in(::open(file.c_str(), kToRead));
  regular_size(in, file);
  std::vector<std::byte> piece(size_t{1} << 20);
  for (size_t n = 0; (n = read_some(in, file, piece.data(), piece.size())) > 0;) f({piece.data(), n});
}

void SharedFile::create(const fs::path& file, std::string_view first, int64_t size) {
  const Descriptor out(::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (const int cause = out.get() < 0 ? errno : make_room(out.get(), 0, size); cause != 0)
    throw OutputError(fmt::format("cannot write {} of {} bytes: {}", file.string(), size, std::strerror(cause)));
  SharedFile(file).write(0, std::as_bytes(std::span(first)));
}

SharedFile::SharedFile(const fs::path& file) : file_(file), fd_(::open(file.c_str(), O_WRONLY | O_CLOEXEC)) {
  if (fd_ < 0) throw OutputError(fmt::format("cannot write {}: {}", file.string(), std::strerror(errno)));
}

SharedFile::~SharedFile() {
  if (fd_ >= 0) ::close(fd_);
}

void SharedFile::write(int64_t at, std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd_, bytes.data(), bytes.size(), at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw OutputError(fmt::format("cannot write {}: {}", file_.string(), std::strerror(errno)));
    bytes = bytes.subspan(static_cast<size_t>(n));
    at += n;
  }
}

void SharedFile::flush() const {
  if (::fsync(fd_) != 0) throw OutputError(fmt::format("cannot write {}: {}", file_.string(), std::strerror(errno)));
}

void sync_directory(const fs::path& directory) {
  const Descriptor in(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  bool flushed = in.get() >= 0 && ::fsync(in.get()) == 0;
  // The whole file system is flushed if a folder cannot be by itself.
  if (!flushed && in.get() >= 0 && is_unknown_operation(errno)) flushed = ::syncfs(in.get()) == 0;
  if (!flushed) throw OutputError(fmt::format("cannot flush {}: {}", directory.string(), std::strerror(errno)));
}

OpenFile::OpenFile(const fs::path& file) : file_(file) {
  Descriptor in(::open(file.c_str(), kToRead));
  size_ = static_cast<int64_t>(regular_size(in, file));
  fd_ = in.release();
}

OpenFile::~OpenFile() { ::close(fd_); }

void OpenFile::read(int64_t at, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t n = ::pread(fd_, out.data(), out.size(), at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw InputError(fmt::format("cannot read {}: {}", file_.string(), std::strerror(errno)));
    if (n == 0)
      throw InputError(fmt::format("{} was cut short while it was used: it had {} bytes, and there are none at {}",
                                   file_.string(), size_, at));
    out = out.subspan(static_cast<size_t>(n));
    at += n;
  }
}

void make_directories(const fs::path& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error || !fs::is_directory(directory, error))
    throw OutputError(fmt::format("cannot make the directory {}: {}", directory.string(),
                                  error ? error.message() : "something else has that name"));
}

uint64_t checksum(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

uint64_t checksum_of(const fs::path& file) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), XXH3_freeState);
  if (!state) throw std::bad_alloc();
  XXH3_64bits_reset(state.get());
  read_pieces(file,
              [&](std::span<const std::byte> piece) { XXH3_64bits_update(state.get(), piece.data(), piece.size()); });
  return XXH3_64bits_digest(state.get());
}

fs::path cache_directory() {
  if (const char* own = environment("TESSERA_CACHE")) return own;
  if (const char* xdg = environment("XDG_CACHE_HOME")) return fs::path(xdg) / "tessera";
  if (const char* home = environment("HOME")) return fs::path(home) / ".cache" / "tessera";
  throw Error("there is no cache directory: set TESSERA_CACHE (or HOME) to a directory that can be written");
}

TemporaryDirectory::TemporaryDirectory(const fs::path& stem) : name_(stem) {
  if (::mkdir(path().c_str(), 0700) != 0)
    throw OutputError(fmt::format("cannot make a temporary directory {}: {}", path().string(), std::strerror(errno)));
}

// Mapping, and a table of what is mapped.

namespace fs = std::filesystem;
namespace {

// A mapped file's entry, which a signal handler can read: of fixed size, and complete before its place is known.
struct Mapped {
  std::atomic<bool> taken{false};
  std::atomic<const std::byte*> begin{nullptr};
  size_t size = 0;
  std::array<char, 512> name{};
};
std::array<Mapped, 64> table;  // files that find no room in it are not named

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
