// A text as the data layer hands it around: bytes, and where the documents in it begin and end.
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

struct Text {
  std::string name;             // where it came from, for messages and dataset.json
  std::string bytes;            // UTF-8 for the char tokenizer; any bytes for the byte tokenizer
  std::vector<Span> documents;  // in order, covering `bytes` without a gap
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

// The two parts of a text: of every document its first part, and the rest, which is held out.
struct Split {
  std::string train;
  std::string val;
};

// A text that is one document.
Text one_document(std::string name, std::string bytes);

// Cuts the last `share` from every document, or a little less: the cut is moved forward to the next start of a UTF-8
// character; the parts of the documents are joined in order. Throws InputError when a part would have fewer than two
// bytes. Cost: one copy.
Split split_text(const Text& text, const HeldOut& held = {});

// Plain text files.

// A file, which may be compressed by gzip or zstd, as one document. A UTF-8 byte order mark is dropped; line ends stay
// as they are, CRLF too. Throws InputError when it is missing, unreadable, no regular file (a directory, a FIFO), empty
// or binary (has a NUL byte). Whether it is UTF-8 is for the tokenizer to ask: the byte tokenizer takes any encoding.
Text load_text_file(const std::filesystem::path& file);
// A file's bytes as one document, as load_text_file() makes it; `name` is the text's name and names it in messages.
Text text_of_bytes(std::string bytes, const std::string& name);

// Files of text that may be compressed by gzip or zstd, which their first bytes say, not their names.

using TextPiece = std::function<void(std::string_view piece)>;

// Calls f for the text of a file, piece after piece, in a few MiB of memory. Throws InputError for a file that cannot
// be read, that is cut short or damaged, that grows beyond 256 times its size, as no text does, or
// that begins as what is no text does, which it names: UTF-16, Parquet, other archives.
void read_text_pieces(const std::filesystem::path& file, const TextPiece& f);

// All of it.
std::string read_text(const std::filesystem::path& file);
// Its first bytes, some thousands where it has as many; none of a file that cannot be read.
std::string text_start(const std::filesystem::path& file);

// The text of compressed or plain bytes; `what` names them. Throws InputError.
void unpack_text(std::string_view bytes, const std::string& what, const TextPiece& f);

// The text of a known name, or nothing for another name:
//   austen           Jane Austen's six novels, one document each
//   tinyshakespeare  the text of char-rnn and nanoGPT: scenes of Shakespeare's plays, one document
// Both are in the public domain; docs/data.md has their sources. They lie compressed in data/texts/, and in every
// program that links this function (1.5 MB). Throws Error when those bytes are damaged. Cost: unpacking, 10 ms.
std::optional<Text> known_text(std::string_view name);

}  // namespace tessera
