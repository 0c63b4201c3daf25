// A text as the data layer hands it around: bytes that are read piece by piece, and where the documents in it begin and
// end.
//
// The last tenth of every document, or another share, is held out for validation, so that both splits see every
// document's style.
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

using TextPiece = std::function<void(std::string_view piece)>;

// A text that is read as often as it is asked for, so that no text has to fit into memory.
struct Text {
  std::string name;                                 // where it came from, for messages and dataset.json
  std::function<void(const TextPiece&)> read = {};  // calls f for its bytes: UTF-8, or any for the byte tokenizer
  std::vector<Span> documents = {};                 // in order, covering the bytes without a gap
  std::string content = {};                         // a hash of the bytes, in hexadecimal digits

  int64_t size() const { return documents.back().end; }
  std::string bytes() const;  // all of them at once
};

// Which part of the data is for validation and not for training: a share from the end, or another file.
struct HeldOut {
  double share = 0.1;
  std::string file = {};  // not empty: instead of a share

  // The number held out of n bytes, documents or examples.
  int64_t of(int64_t n) const;
  // Throws Error (usage) for data that has its own part for validation, where something else is asked for.
  void refuse(const std::string& data) const;
};

// Bytes of a text, and whether they are held out.
using PartPiece = std::function<void(std::string_view piece, bool held)>;

// Cuts the last `share` from every document, or a little less: the cut is moved forward to the next start of a UTF-8
// character. Calls f for all bytes in order. Throws InputError when a part has fewer than two bytes.
void split_text(const Text& text, const HeldOut& held, const PartPiece& f);

// Plain text files.

// A file, which may be compressed by gzip or zstd, as one document. A UTF-8 byte order mark is dropped; line ends stay
// as they are, CRLF too. Throws InputError when it is missing, unreadable, no regular file (a directory, a FIFO), empty
// or binary (has a NUL byte). Whether it is UTF-8 is for the tokenizer to ask: the byte tokenizer takes any encoding.
// Cost: the file is read once, and again whenever the text is; a file that has another size then is refused.
Text load_text_file(const std::filesystem::path& file);
// Bytes in memory as the text of a file, with its documents, or as one; `name` is the text's name and names it in
// messages.
Text text_of_bytes(std::string bytes, const std::string& name, std::vector<Span> documents = {});

// Files of text that may be compressed by gzip or zstd, which their first bytes say, not their names.

// Calls f for the text of a file, piece after piece, in a few MiB of memory. Throws InputError for a file that cannot
// be read, that is cut short or damaged, that grows beyond 256 times its size, as no text does, or
// that begins as what is no text does, which it names: UTF-16, Parquet, other archives.
void read_text_pieces(const std::filesystem::path& file, const TextPiece& f);

// All of it. Throws InputError also if the memory does not allow it.
std::string read_text(const std::filesystem::path& file);
// Its first bytes, some thousands where it has as many; none of a file that cannot be read.
std::string text_start(const std::filesystem::path& file);

// std::getline() of standard input. Throws InputError if the memory does not allow the line.
bool read_line(std::string& line);

// The text of compressed or plain bytes; `what` names them. Throws InputError.
void unpack_text(std::string_view bytes, const std::string& what, const TextPiece& f);

// The text of a known name, or nothing for another name:
//   austen           Jane Austen's six novels, one document each
//   tinyshakespeare  the text of char-rnn and nanoGPT: scenes of Shakespeare's plays, one document
// Both are in the public domain; docs/data.md has their sources. They lie compressed in data/texts/, and in every
// program that links this function (1.5 MB). Throws Error when those bytes are damaged. Cost: unpacking, 10 ms.
std::optional<Text> known_text(std::string_view name);

}  // namespace tessera
