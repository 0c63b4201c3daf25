// Text files, which may be compressed by gzip or zstd (detected by their first bytes).
#pragma once
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace tessera {

using TextChunk = std::function<void(std::string_view chunk)>;

// Calls f with decompressed chunks, using a few MiB of memory. Throws InputError for a file that is unreadable,
// truncated or corrupt, expands more than 256-fold, or is in another known format: UTF-16, Parquet, other archives.
void read_text_chunks(const std::filesystem::path& file, const TextChunk& f);

// Throws InputError also if the text does not fit in memory.
std::string read_text(const std::filesystem::path& file);
// The first few thousand bytes; empty if the file cannot be read.
std::string text_start(const std::filesystem::path& file);

// The bytes may be compressed. Throws InputError.
void unpack_text(std::string_view bytes, const std::string& what, const TextChunk& f);

}  // namespace tessera
