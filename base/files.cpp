// File contents, checksums and the cache directory.
#include "base/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/bad_input.h"

namespace tessera {

namespace fs = std::filesystem;
namespace {

// A checkout without Git LFS contains a pointer instead of the file.
void refuse_pointer(std::string_view begin, const fs::path& file) {
  if (begin.starts_with("version https://git-lfs.github.com/spec/v1\n"))
    bad_input("{} is a Git LFS pointer; expected the file itself, which 'git lfs pull' fetches", file.string());
}

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

// Returns `none` if the name does not exist; throws InputError if it cannot be resolved.
fs::file_type file_kind(const fs::path& name) {
  std::error_code error;
  const fs::file_type kind = fs::status(name, error).type();
  if (kind == fs::file_type::none && error != std::errc::filename_too_long)
    bad_input("cannot open {}: {}", name.string(), error.message());
  return kind == fs::file_type::not_found ? fs::file_type::none : kind;
}

}  // namespace

std::string read_file(const fs::path& file) {
  std::string bytes = read_full(file);
  refuse_pointer(bytes, file);
  return bytes;
}

bool is_there(const fs::path& name) { return file_kind(name) != fs::file_type::none; }
bool names_directory(const fs::path& name) { return file_kind(name) == fs::file_type::directory; }
bool is_plain_file(const fs::path& name) { return file_kind(name) == fs::file_type::regular; }
int32_t first_number(const fs::path& file) {
  int32_t number = 0;
  if (is_plain_file(file)) std::ifstream(file, std::ios::binary).read(reinterpret_cast<char*>(&number), sizeof(number));
  return number;
}

std::string_view known_kind(std::string_view begin, bool as_text) {
  using namespace std::string_view_literals;
  struct Kind {
    std::string_view begin, is;
    bool may_be_text = false;
  };
  static constexpr Kind kKinds[] = {
      {"version https://git-lfs"sv, "a Git LFS pointer: 'git lfs pull' fetches the file itself", true},
      {"<!doctype html"sv, "a web page", true},
      {"<!DOCTYPE html"sv, "a web page", true},
      {"<html"sv, "a web page", true},
      {"<?xml"sv, "XML", true},
      {"\x80\x02"sv, "a Python pickle", true},
      {"\x1f\x8b"sv, "compressed with gzip", true},
      {"\x28\xb5\x2f\xfd"sv, "compressed with zstd", true},
      {"\xFF\xFE"sv, "UTF-16 text, which 'iconv -f UTF-16 -t UTF-8' converts"},
      {"\xFE\xFF"sv, "UTF-16 text, which 'iconv -f UTF-16 -t UTF-8' converts"},
      {"PK\x03\x04"sv, "a zip archive, as written by torch.save(); 'unzip' extracts other archives"},
      {"GGUF"sv, "a GGUF file (llama.cpp)"},
      {"\x89HDF"sv, "an HDF5 file"},
      {"MMIDIDX\0"sv, "a Megatron-LM token index"},
      {"TESSTOK\n"sv, "a Tessera token file; pass its directory instead"},
      {"PAR1"sv, "Parquet, which 'python3 -m tessera.rows FILE > rows.jsonl' converts to JSON"},
      {"ARROW1"sv, "Arrow, which 'python3 -m tessera.rows FILE > rows.jsonl' converts to JSON"},
      {"\xFF\xFF\xFF\xFF"sv, "Arrow, which 'python3 -m tessera.rows FILE > rows.jsonl' converts to JSON"},
      {"\x93NUMPY"sv, "a NumPy array"},
      {"%PDF-"sv, "PDF"},
      {"SQLite format 3"sv, "SQLite"},
      {"BZh91AY&SY"sv, "compressed with bzip2"},
      {"\xFD\x37zXZ"sv, "compressed with xz"},
      {"\x04\x22\x4D\x18"sv, "compressed with lz4"}};
  if (begin.empty()) return as_text ? "" : "an empty file";
  for (const Kind& kind : kKinds)
    if (begin.starts_with(kind.begin) && !(as_text && kind.may_be_text)) return kind.is;
  return "";
}

bool is_system_file(const fs::path& file) {
  const std::string name = file.filename().string();
  return name.starts_with("._") || name == ".DS_Store" || name == "__MACOSX" || name == "desktop.ini" ||
         name == "Thumbs.db";
}

void read_chunks(const fs::path& file, const std::function<void(std::span<const std::byte>)>& f) {
  const OpenFile in(file);
  std::vector<std::byte> memory(static_cast<size_t>(std::min(in.size(), int64_t{1} << 20)));
  for (int64_t at = 0; at < in.size(); at += std::ssize(memory)) {
    const auto chunk = std::span(memory).first(static_cast<size_t>(std::min(std::ssize(memory), in.size() - at)));
    in.read(at, chunk);
    if (at == 0) refuse_pointer({reinterpret_cast<const char*>(chunk.data()), chunk.size()}, file);
    f(chunk);
  }
}

void SharedFile::create(const fs::path& file, std::string_view first, int64_t size) {
  const Descriptor out(::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (const int cause = out.get() < 0 ? errno : reserve_space(out.get(), 0, size); cause != 0)
    throw OutputError(fmt::format("cannot write {} of {} bytes: {}", file.string(), size, std::strerror(cause)));
  SharedFile(file).write(0, std::as_bytes(std::span(first)));
}

SharedFile::SharedFile(const fs::path& file) : file_(file), fd_(::open(file.c_str(), O_WRONLY | O_CLOEXEC)) {
  if (!fd_) cannot_write(file, errno);
}

void SharedFile::write(int64_t at, std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd_.get(), bytes.data(), bytes.size(), at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) cannot_write(file_, errno);
    bytes = bytes.subspan(static_cast<size_t>(n));
    at += n;
  }
}

void SharedFile::flush() const {
  if (::fsync(fd_.get()) != 0) cannot_write(file_, errno);
}

void sync_directory(const fs::path& directory) {
  const Descriptor in(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  bool flushed = in.get() >= 0 && ::fsync(in.get()) == 0;
  if (!flushed && in.get() >= 0 && is_unknown_operation(errno)) flushed = ::syncfs(in.get()) == 0;
  if (!flushed) throw OutputError(fmt::format("cannot flush {}: {}", directory.string(), std::strerror(errno)));
}

void make_directories(const fs::path& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error || !fs::is_directory(directory, error))
    throw OutputError(fmt::format("cannot create the directory {}: {}", directory.string(),
                                  error ? error.message() : "the path exists and is not a directory"));
}

uint64_t checksum(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

uint64_t file_checksum(const fs::path& file) {
  return checksum_of_chunks([&](const ChunkFunction& add) { read_chunks(file, add); });
}

uint64_t checksum_of_chunks(const std::function<void(const ChunkFunction&)>& walk) {
  Checksum sum;
  walk([&](std::span<const std::byte> chunk) { sum.add(chunk); });
  return sum.value();
}

Checksum::Checksum() : state_(XXH3_createState(), XXH3_freeState) {
  if (!state_) throw std::bad_alloc();
  XXH3_64bits_reset(state_.get());
}
void Checksum::add(std::span<const std::byte> bytes) { XXH3_64bits_update(state_.get(), bytes.data(), bytes.size()); }
uint64_t Checksum::value() const { return XXH3_64bits_digest(state_.get()); }

fs::path cache_directory() {
  if (const char* own = environment("TESSERA_CACHE")) return own;
  if (const char* xdg = environment("XDG_CACHE_HOME")) return fs::path(xdg) / "tessera";
  if (const char* home = environment("HOME")) return fs::path(home) / ".cache" / "tessera";
  throw Error("no cache directory: set TESSERA_CACHE (or HOME) to a writable directory");
}

TemporaryDirectory::TemporaryDirectory(const fs::path& stem) : name_(stem) {
  if (::mkdir(path().c_str(), 0700) != 0)
    throw OutputError(fmt::format("cannot create a temporary directory {}: {}", path().string(), std::strerror(errno)));
}

namespace {

// A signal handler reads entries, so they have a fixed size and are complete before their address is published.
struct Mapped {
  std::atomic<bool> taken{false};
  std::atomic<const std::byte*> begin{nullptr};
  size_t size = 0;
  std::array<char, 512> name{};
};
std::array<Mapped, 1024> table;  // further files have no entry

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

}  // namespace

MappedFile::MappedFile(const fs::path& file) {
  const OpenFile in(file);
  size_ = static_cast<size_t>(in.size());
  if (size_ == 0) return;
  void* const map = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, in.descriptor(), 0);
  if (map == MAP_FAILED) {
    if (!is_unknown_operation(errno)) bad_input("cannot map {}: {}", file.string(), std::strerror(errno));
    const auto read = std::make_shared<const std::string>(read_full(file, in.size(), 1));  // without mmap()
    size_ = read->size();
    data_ = {read, reinterpret_cast<const std::byte*>(read->data())};
    return;
  }
  enter(static_cast<const std::byte*>(map), size_, file.string());
  data_ = {static_cast<const std::byte*>(map), [size = size_](const std::byte* begin) {
             leave(begin);
             ::munmap(const_cast<std::byte*>(begin), size);
           }};
  refuse_pointer({static_cast<const char*>(map), size_}, file);
}

const char* mapped_file_at(const void* address) {
  const auto* const at = static_cast<const std::byte*>(address);
  for (const Mapped& m : table)
    if (const std::byte* const begin = m.begin; begin != nullptr && at >= begin && at < begin + m.size)
      return m.name.data();
  return nullptr;
}

}  // namespace tessera
