// Small helpers of the data layer: whole files, checksums, the cache directory.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>

namespace tessera {

// All bytes of a regular file. Throws InputError when it is missing, unreadable, or something else than a file.
std::string read_file(const std::filesystem::path& file);

// Writes a file beside `file`, flushes it to disk and renames it, so that `file` is whole or absent. Throws
// OutputError.
void write_file(const std::filesystem::path& file, std::string_view first, std::string_view second = {});

// Makes a directory and its parents. Throws OutputError.
void make_directories(const std::filesystem::path& directory);

// SHA-256 in lower-case hexadecimal.
std::string sha256(std::string_view bytes);

// $TESSERA_CACHE, else $XDG_CACHE_HOME/tessera, else ~/.cache/tessera. Throws Error (usage) when none is set.
std::filesystem::path cache_directory();

// A new empty directory that is removed, with all in it, at the end of the scope. Throws OutputError.
class TemporaryDirectory {
 public:
  // Named `prefix` and six random characters; the parent must exist.
  explicit TemporaryDirectory(const std::filesystem::path& prefix);
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace tessera
