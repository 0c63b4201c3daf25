// Small helpers of the data layer: whole files, checksums, the cache directory.
#pragma once
#include <functional>
#include <memory>

#include "tensor/write_file.h"

struct XXH3_state_s;

namespace tessera {

// All bytes of a regular file. Throws InputError when it is missing, unreadable, or something else than a file.
std::string read_file(const std::filesystem::path& file);

// The kind of a file that stands in the place of another, by its first bytes: "a pointer of git-lfs: ...", "a web
// page". Empty for others, and where a text is expected for what a text may begin with too.
std::string_view known_kind(std::string_view begin, bool as_text = false);
inline constexpr std::string_view kConvertsRows = "'python3 -m tessera.rows FILE > rows.jsonl' converts it";
// Whether a file is one that Windows, macOS or an archive program adds to a directory: desktop.ini, ._NAME.
bool is_of_system(const std::filesystem::path& file);

// Whether something has the name, a folder, or a regular file. Throws InputError where links or rights keep it secret.
bool is_there(const std::filesystem::path& name);
bool is_folder(const std::filesystem::path& name);
bool is_plain_file(const std::filesystem::path& name);
// The first four bytes of a regular file as a number; 0 of what cannot be read.
int32_t first_number(const std::filesystem::path& file);

// Calls f for the bytes of a regular file, piece after piece, in one MiB of memory: a mapped file would count as the
// process's own for as long as it is read. Throws like read_file().
void read_pieces(const std::filesystem::path& file, const std::function<void(std::span<const std::byte>)>& f);

// A file that several writers fill, each its own bytes. Everything throws OutputError.
class SharedFile {
 public:
  // Makes the file, with room for `size` bytes, of which `first` are the first; it must not be there yet.
  static void create(const std::filesystem::path& file, std::string_view first, int64_t size);
  explicit SharedFile(const std::filesystem::path& file);
  void write(int64_t at, std::span<const std::byte> bytes) const;
  void flush() const;  // to disk

 private:
  std::filesystem::path file_;
  Descriptor fd_;
};

// Flushes a directory's entries to disk, so that a rename in it survives a power cut. Throws OutputError.
void sync_directory(const std::filesystem::path& directory);

// Makes a directory and its parents. Throws OutputError.
void make_directories(const std::filesystem::path& directory);

// XXH3-64 of bytes that come one after another.
class Checksum {
 public:
  Checksum();
  void add(std::span<const std::byte> bytes);
  uint64_t value() const;

 private:
  std::shared_ptr<XXH3_state_s> state_;
};

// XXH3-64 of bytes, of a file, and of the pieces that `walk` hands on. Throws like read_file().
using PieceFunction = std::function<void(std::span<const std::byte> piece)>;
uint64_t checksum(std::string_view bytes);
uint64_t file_checksum(const std::filesystem::path& file);
uint64_t checksum_of_pieces(const std::function<void(const PieceFunction&)>& walk);

// $TESSERA_CACHE, else $XDG_CACHE_HOME/tessera, else ~/.cache/tessera. Throws Error (usage) when none is set.
std::filesystem::path cache_directory();

// A new empty directory that is removed, with all in it, at the end of the scope. Throws OutputError.
class TemporaryDirectory {
 public:
  // Named `stem` and what TemporaryName adds; the parent must exist.
  explicit TemporaryDirectory(const std::filesystem::path& stem);
  const std::filesystem::path& path() const { return name_.path(); }

 private:
  TemporaryName name_;
};

// A file mapped read-only for as long as the object lives; by default nothing. A file system that cannot map has it
// read into memory.
//
// A file that is cut short meanwhile ends its readers by SIGBUS. A program that would rather say so than be killed asks
// mapped_file_at().

class MappedFile {
 public:
  MappedFile() = default;
  // Throws InputError when it is missing, unreadable or something else than a file.
  explicit MappedFile(const std::filesystem::path& file);
  std::span<const std::byte> bytes() const { return {data_.get(), size_}; }

 private:
  size_t size_ = 0;
  std::shared_ptr<const std::byte> data_;
};

// The name of the file that is mapped at an address, which a signal handler may ask for; null when there is none.
const char* mapped_file_at(const void* address);

}  // namespace tessera
