// Reading of files, and atomic or in-place writing.
#include "base/write_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace tessera {

namespace fs = std::filesystem;
namespace {

[[noreturn]] void not_read(const std::string& words) { throw InputError(words); }

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

// Returns 0 or an errno.
int write_and_close(int fd, std::span<const std::string_view> chunks, bool flush) {
  const auto write_chunk = [&](std::string_view chunk) { return write_all(fd, chunk); };
  const bool ok = std::ranges::all_of(chunks, write_chunk) && (!flush || ::fsync(fd) == 0);
  const int cause = ok ? 0 : errno;
  return ::close(fd) == 0 || !ok ? cause : errno;
}

// Opens a file that must be written in place: standard output or error, a pipe or a device. Negative for other files.
int open_in_place(const fs::path& file) {
  struct stat target_info {};
  if (::stat(file.c_str(), &target_info) != 0) return -1;
  for (const int standard : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat own {};
    if (::fstat(standard, &own) == 0 && own.st_dev == target_info.st_dev && own.st_ino == target_info.st_ino)
      return ::fcntl(standard, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  }
  if (S_ISREG(target_info.st_mode)) return -1;
  const int fd = ::open(file.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
  if (fd < 0) cannot_write(file, errno);
  return fd;
}

fs::path resolve_links(fs::path file) {
  std::error_code error;
  for (int links = 0; fs::is_symlink(fs::symlink_status(file, error)); ++links) {
    const fs::path target = fs::read_symlink(file, error);
    if (error) cannot_write(file, error.value());
    if (links == 40) cannot_write(file, ELOOP);
    file = file.parent_path() / target;
  }
  return file;
}

}  // namespace

void cannot_write(const fs::path& file, int cause) {
  throw OutputError("cannot write " + file.string() + ": " + std::strerror(cause));
}

std::vector<fs::path> list_entries(const fs::path& directory) {
  std::error_code error;
  std::vector<fs::path> out;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
    out.push_back(it->path());
  return out;
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

// O_NONBLOCK: opening a FIFO must not wait for its writer.
OpenFile::OpenFile(const fs::path& file) : file_(file), fd_(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  struct stat info {};
  if (fd_.get() < 0) not_read("cannot open " + file.string() + ": " + std::strerror(errno));
  if (::fstat(fd_.get(), &info) != 0) not_read("cannot read " + file.string() + ": " + std::strerror(errno));
  if (S_ISDIR(info.st_mode)) not_read(file.string() + " is a directory; expected a file");
  if (!S_ISREG(info.st_mode)) not_read(file.string() + " is not a regular file (a pipe or a device); expected a file");
  size_ = info.st_size;
}

void OpenFile::read(int64_t at, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t n = ::pread(fd_.get(), out.data(), out.size(), at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) not_read("cannot read " + file_.string() + ": " + std::strerror(errno));
    if (n == 0)
      not_read(file_.string() + " was truncated while in use: it had " + std::to_string(size_) +
               " bytes and now ends before byte " + std::to_string(at));
    out = out.subspan(static_cast<size_t>(n));
    at += n;
  }
}

std::string read_full(const fs::path& file, int64_t limit, int64_t growth) {
  const OpenFile in(file);
  if (in.size() > limit)
    not_read(file.string() + ": " + std::to_string(in.size()) + " bytes; expected at most " + std::to_string(limit));
  require_memory(file.string(), in.size(), growth);
  std::string bytes(static_cast<size_t>(in.size()), '\0');
  in.read(0, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

bool write_file(const fs::path& file, std::span<const std::string_view> chunks) {
  if (const int in_place = open_in_place(file); in_place >= 0) {
    if (const int cause = write_and_close(in_place, chunks, false)) cannot_write(file, cause);
    return false;
  }
  const fs::path name = resolve_links(file);
  const TemporaryName temporary(name);
  const int made = ::open(temporary.path().c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
  if (made < 0) cannot_write(file, errno);
  if (const int cause = write_and_close(made, chunks, true)) cannot_write(file, cause);
  if (::rename(temporary.path().c_str(), name.c_str()) != 0) cannot_write(file, errno);
  return true;
}

bool is_unknown_operation(int cause) {
  return cause == EINVAL || cause == ENOSYS || cause == EOPNOTSUPP || cause == ENOLCK || cause == ENODEV;
}

int reserve_space(int descriptor, int64_t from, int64_t to) {
  int cause = EINTR;
  while (cause == EINTR) cause = ::posix_fallocate(descriptor, from, to - from);
  if (!is_unknown_operation(cause)) return cause;
  const std::vector<char> zeros(size_t{1} << 20);
  while (from < to) {
    const ssize_t n = ::pwrite(descriptor, zeros.data(), std::min(zeros.size(), static_cast<size_t>(to - from)), from);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EIO;
    from += n;
  }
  return 0;
}

namespace fs = std::filesystem;
namespace {

constexpr std::string_view kMark = ".tmp-";
constexpr size_t kLongestStem = 190;  // bytes; a file name has at most 255
constexpr size_t kHostDigits = 8, kRandomDigits = 16;

std::mutex temporaries_mutex;
// Temporaries of this process. Never destroyed, because the program may exit while one is being written.
std::vector<fs::path>& temporaries() {
  static auto* const all = new std::vector<fs::path>;
  return *all;
}

std::string hexadecimal(uint64_t value, size_t digits) {
  std::array<char, 16> text{};
  const auto [end, error] = std::to_chars(text.data(), text.data() + text.size(), value, 16);
  const std::string found(text.data(), end);
  return std::string(digits - std::min(digits, found.size()), '0') + found;
}

std::string host_mark() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  uint32_t hash = 2166136261U;  // FNV-1a
  for (const char* c = name.data(); *c != '\0'; ++c) hash = (hash ^ static_cast<unsigned char>(*c)) * 16777619U;
  return hexadecimal(hash, kHostDigits);
}

std::string random_mark() {
  uint64_t random = 0;
  if (::getrandom(&random, sizeof(random), 0) != static_cast<ssize_t>(sizeof(random)))
    throw OutputError(std::string("cannot generate a random name: ") + std::strerror(errno));
  return hexadecimal(random, kRandomDigits);
}

struct Mark {
  pid_t process = 0;
  std::string_view host;  // empty if invalid
};
std::optional<Mark> find_mark(std::string_view name) {
  const size_t at = name.rfind(kMark);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view mark = name.substr(at + kMark.size());
  Mark out;
  const char* const end = std::from_chars(mark.data(), mark.data() + mark.size(), out.process).ptr;
  const std::string_view rest = mark.substr(static_cast<size_t>(end - mark.data()));
  const auto hexadecimal = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || c == '-'; };
  if (out.process > 0 && rest.size() == kHostDigits + kRandomDigits + 2 && rest[0] == '-' &&
      rest[kHostDigits + 1] == '-' && std::ranges::all_of(rest, hexadecimal))
    out.host = rest.substr(1, kHostDigits);
  return out;
}

bool is_day_old(const fs::path& path) {
  std::error_code error;
  const fs::file_time_type written = fs::last_write_time(path, error);
  return !error && fs::file_time_type::clock::now() - written > std::chrono::hours(24);
}

bool is_being_written(const fs::path& path, pid_t process) {
  if (process <= 0) return false;
  if (process != ::getpid()) return ::kill(process, 0) == 0 || errno == EPERM;
  const std::lock_guard lock(temporaries_mutex);  // an unlisted file is from a dead process with the same pid
  const auto same = [&](const fs::path& own) { return own.filename() == path.filename(); };
  return std::ranges::any_of(temporaries(), same);
}

}  // namespace

TemporaryName::TemporaryName(const fs::path& stem) {
  const std::string end = std::string(kMark) + std::to_string(::getpid()) + "-" + host_mark() + "-" + random_mark();
  path_ = stem.parent_path() / (stem.filename().string().substr(0, kLongestStem) + end);
  const std::lock_guard lock(temporaries_mutex);
  temporaries().push_back(path_);
}

TemporaryName::~TemporaryName() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  const std::lock_guard lock(temporaries_mutex);
  std::erase(temporaries(), path_);
}

void remove_temporaries() {
  temporaries_mutex.lock();  // never unlocked
  for (const fs::path& path : temporaries()) {
    std::error_code error;
    do fs::remove_all(path, error);
    while (error == std::errc::directory_not_empty);  // another thread wrote to it
  }
}

std::vector<fs::path> remove_stale(const fs::path& directory, bool ours) {
  const std::string here = host_mark();
  std::vector<fs::path> removed;
  for (const fs::path& path : list_entries(directory)) {
    const std::string name = path.filename().string();
    const std::optional<Mark> mark = find_mark(name);
    if (!mark || (!ours && mark->host.empty())) continue;
    const bool left = ours || mark->host == here ? !is_being_written(path, mark->process) : is_day_old(path);
    std::error_code failed;
    if (left && fs::remove_all(path, failed) > 0 && !failed) removed.push_back(path);
  }
  return removed;
}

fs::path temporary_directory() {
  std::error_code error;
  fs::path directory = fs::temp_directory_path(error);
  if (!error) return directory;
  const char* const named = std::getenv("TMPDIR");
  throw OutputError("TMPDIR: expected a directory for temporary files, got '" +
                    std::string(named != nullptr ? named : "/tmp") + "': " + error.message());
}

}  // namespace tessera
