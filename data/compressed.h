// Files of text that may be compressed by gzip or zstd, which their first bytes say, not their names.
#pragma once
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace tessera {

using TextPiece = std::function<void(std::string_view piece)>;

// Calls f for the text of a file, piece after piece, in a few MiB of memory. Throws InputError for a file that cannot
// be read, that is cut short or damaged, or that grows beyond 256 times its size, as no text does.
void read_text_pieces(const std::filesystem::path& file, const TextPiece& f);

// All of it.
std::string read_text(const std::filesystem::path& file);

// The text of compressed or plain bytes; `what` names them. Throws InputError.
void unpack_text(std::string_view bytes, const std::string& what, const TextPiece& f);

}  // namespace tessera
