// Texts: bytes read in chunks, and the boundaries of documents.
//
// By default the last tenth of every document is held out for validation, so that both splits cover its style.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/compressed_text.h"

namespace tessera {

struct Span {
  int64_t begin = 0;
  int64_t end = 0;
};

// Reread for every pass, so the text need not fit in memory.
struct Text {
  std::string name;  // for messages and dataset.json
  // Calls its argument with each chunk: UTF-8, or arbitrary bytes for the byte tokenizer.
  std::function<void(const TextChunk&)> read = {};
  std::vector<Span> documents = {};  // contiguous, covering all bytes
  std::string content = {};          // hexadecimal hash

  int64_t size() const { return documents.back().end; }
  std::string bytes() const;
};

struct HeldOut {
  double fraction = 0.1;
  std::string file = {};  // replaces `fraction`

  // Number held out of n bytes, documents or examples.
  int64_t of(int64_t n) const;
  // Throws Error (usage) unless this is the default, because `data` has its own validation split.
  void refuse(const std::string& data) const;
};

using SplitChunk = std::function<void(std::string_view chunk, bool held)>;

// Boundaries move forward to the next UTF-8 character. Calls f for all bytes in order. Throws InputError if a split has
// fewer than two bytes.
void split_text(const Text& text, const HeldOut& held, const SplitChunk& f);

// Loads a text file, possibly compressed, as one document. A UTF-8 byte order mark is dropped; line endings are
// unchanged. Throws InputError if the file is missing, unreadable, not regular, empty or binary (contains a NUL byte),
// or changes size between passes. The tokenizer validates UTF-8, because the byte tokenizer accepts any encoding. Cost:
// one read per pass.
Text load_text_file(const std::filesystem::path& file);
// Without `documents`, one document.
Text text_of_bytes(std::string bytes, const std::string& name, std::vector<Span> documents = {});

// As std::getline(). Throws InputError if the line does not fit in memory.
bool read_line(std::string& line);

// nullopt for any name other than:
//   austen           Jane Austen's six novels, one document each
//   tinyshakespeare  the text of char-rnn and nanoGPT: scenes of Shakespeare's plays, one document
// Both are in the public domain (sources: docs/data.md), stored compressed in data/texts/ and embedded in programs that
// link this function (1.5 MB). Throws Error if the embedded bytes are corrupt. Cost: 10 ms.
std::optional<Text> builtin_text(std::string_view name);

}  // namespace tessera
