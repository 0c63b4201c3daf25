// Texts of the data layer: bytes that are read in chunks, and the boundaries of their documents.
//
// The last tenth (by default) of every document is held out for validation, so that both splits cover the style of
// every document.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Bytes [begin, end) of a text.
struct Span {
  int64_t begin = 0;
  int64_t end = 0;
};

using TextChunk = std::function<void(std::string_view piece)>;

// A text that is read again for every pass, so that it need not fit into memory.
struct Text {
  std::string name;                                 // origin, for messages and dataset.json
  std::function<void(const TextChunk&)> read = {};  // calls f with its bytes: UTF-8, or any (byte tokenizer)
  std::vector<Span> documents = {};                 // in order and contiguous, covering all bytes
  std::string content = {};                         // hexadecimal hash of the bytes

  int64_t size() const { return documents.back().end; }
  std::string bytes() const;  // the entire text
};

// The validation split: a fraction from the end of the data, or a separate file.
struct HeldOut {
  double share = 0.1;
  std::string file = {};  // if not empty, replaces the fraction

  // The number held out of n bytes, documents or examples.
  int64_t of(int64_t n) const;
  // Throws Error (usage) unless this is the default, for data with its own validation split.
  void refuse(const std::string& data) const;
};

// A chunk of a text, and whether it is held out.
using SplitChunk = std::function<void(std::string_view piece, bool held)>;

// Holds out the last `share` of every document; the boundary moves forward to the next start of a UTF-8 character.
// Calls f for all bytes in order. Throws InputError if a split has fewer than two bytes.
void split_text(const Text& text, const HeldOut& held, const SplitChunk& f);

// Plain text files.

// Loads a text file, possibly compressed by gzip or zstd, as one document. A UTF-8 byte order mark is dropped; line
// endings, including CRLF, are unchanged. Throws InputError if the file is missing, unreadable, not regular, empty or
// binary (contains a NUL byte). UTF-8 is validated by the tokenizer, because the byte tokenizer accepts any encoding.
// Cost: one read per pass; throws if the size has changed since the first.
Text load_text_file(const std::filesystem::path& file);
// Bytes in memory as a text, with the given documents or as one; `name` names it in messages too.
Text text_of_bytes(std::string bytes, const std::string& name, std::vector<Span> documents = {});

// --- text files that may be compressed by gzip or zstd, detected by their first bytes ---

// Calls f with the decompressed chunks of a file, using a few MiB of memory. Throws InputError for a file that is
// unreadable, truncated or corrupt, that expands more than 256-fold, or that is of a known other format: UTF-16,
// Parquet, other archives.
void read_text_chunks(const std::filesystem::path& file, const TextChunk& f);

// The entire text. Throws InputError also if it does not fit in memory.
std::string read_text(const std::filesystem::path& file);
// The first few thousand bytes of the text; empty if the file cannot be read.
std::string text_start(const std::filesystem::path& file);

// std::getline() of standard input. Throws InputError if the line does not fit in memory.
bool read_line(std::string& line);

// Decompresses bytes if they are compressed; `what` names them. Throws InputError.
void unpack_text(std::string_view bytes, const std::string& what, const TextChunk& f);

// A built-in text by its name; nullopt for other names:
//   austen           Jane Austen's six novels, one document each
//   tinyshakespeare  the text of char-rnn and nanoGPT: scenes of Shakespeare's plays, one document
// Both are in the public domain; docs/data.md lists their sources. They are stored compressed in data/texts/ and
// embedded in programs that link this function (1.5 MB). Throws Error if these bytes are corrupt. Cost: 10 ms.
std::optional<Text> builtin_text(std::string_view name);

}  // namespace tessera
