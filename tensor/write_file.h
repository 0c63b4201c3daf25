// Files that are written whole or not at all.
#pragma once
#include <filesystem>
#include <span>
#include <string_view>

namespace tessera {

// Writes a file beside `file`, flushes it to disk and renames it, so that `file` is whole or absent. A symbolic link is
// followed: what it leads to is written, beside that. What is no file, a pipe or a device, and the file that is this
// process's standard output or error, are not replaced but written to. Returns whether `file` has become a file of
// its own. Throws OutputError.
bool write_file(const std::filesystem::path& file, std::span<const std::string_view> parts);
inline bool write_file(const std::filesystem::path& file, std::string_view first, std::string_view second = {}) {
  const std::string_view parts[] = {first, second};
  return write_file(file, parts);
}

}  // namespace tessera
