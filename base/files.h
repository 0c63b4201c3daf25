// Files, checksums, and the cache directory.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/write_file.h"

struct XXH3_state_s;

namespace tessera {

// Throws InputError unless the file is regular and readable.
std::string read_file(const std::filesystem::path& file);

// Recognizes a file of the wrong kind by its first bytes: "a Git LFS pointer: ...", "a web page". Empty if unknown, or
// if `as_text` is set and text could also begin with these bytes.
std::string_view known_kind(std::string_view begin, bool as_text = false);
inline constexpr std::string_view kConvertsRows = "'python3 -m tessera.rows FILE > rows.jsonl' converts it";
// Whether the file is metadata of Windows, macOS or an archive program: desktop.ini, ._NAME.
bool is_system_file(const std::filesystem::path& file);

// Throw InputError if links or permissions prevent resolving the name.
bool is_there(const std::filesystem::path& name);
bool names_directory(const std::filesystem::path& name);
bool is_plain_file(const std::filesystem::path& name);
// The first four bytes as an integer; 0 if the file cannot be read.
int32_t first_number(const std::filesystem::path& file);

// Calls f for successive chunks, using 1 MiB of memory (a mapped file would count as resident memory). Throws like
// read_file().
void read_chunks(const std::filesystem::path& file, const std::function<void(std::span<const std::byte>)>& f);

// Several writers fill disjoint ranges of the file. All functions throw OutputError.
class SharedFile {
 public:
  // Creates a file of `size` bytes that begins with `first`; it must not exist.
  static void create(const std::filesystem::path& file, std::string_view first, int64_t size);
  explicit SharedFile(const std::filesystem::path& file);
  void write(int64_t at, std::span<const std::byte> bytes) const;
  void flush() const;  // to disk

 private:
  std::filesystem::path file_;
  Descriptor fd_;
};

// Makes a rename in the directory survive a power failure. Throws OutputError.
void sync_directory(const std::filesystem::path& directory);

// Also creates missing parents. Throws OutputError.
void make_directories(const std::filesystem::path& directory);

class Checksum {
 public:
  Checksum();
  void add(std::span<const std::byte> bytes);
  uint64_t value() const;

 private:
  std::shared_ptr<XXH3_state_s> state_;
};

// XXH3-64 checksums. Throw like read_file().
using ChunkFunction = std::function<void(std::span<const std::byte> chunk)>;
uint64_t checksum(std::string_view bytes);
uint64_t file_checksum(const std::filesystem::path& file);
uint64_t checksum_of_chunks(const std::function<void(const ChunkFunction&)>& walk);

// $TESSERA_CACHE, else $XDG_CACHE_HOME/tessera, else ~/.cache/tessera. Throws Error (usage) if none is set.
std::filesystem::path cache_directory();

// Removed with its contents at the end of the scope. Throws OutputError.
class TemporaryDirectory {
 public:
  // The name is `stem` plus the suffix of TemporaryName; the parent must exist.
  explicit TemporaryDirectory(const std::filesystem::path& stem);
  const std::filesystem::path& path() const { return name_.path(); }

 private:
  TemporaryName name_;
};

// A file mapped read-only, or read into memory on file systems without mmap(). If another process truncates a mapped
// file, readers receive SIGBUS; a signal handler can find the name with mapped_file_at().

class MappedFile {
 public:
  MappedFile() = default;
  // Throws like read_file().
  explicit MappedFile(const std::filesystem::path& file);
  std::span<const std::byte> bytes() const { return {data_.get(), size_}; }

 private:
  size_t size_ = 0;
  std::shared_ptr<const std::byte> data_;
};

// Null if no file is mapped there. Async-signal-safe.
const char* mapped_file_at(const void* address);

}  // namespace tessera
