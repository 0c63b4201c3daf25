// Plain text files.
#pragma once
#include <filesystem>
#include <string>

#include "data/text.h"

namespace tessera {

// A file, which may be compressed by gzip or zstd, as one document. A UTF-8 byte order mark is dropped; line ends stay as they are, CRLF too. Throws InputError
// when it is missing, unreadable, no regular file (a directory, a FIFO), empty or binary (has a NUL byte). Whether it
// is UTF-8 is for the tokenizer to ask: the byte tokenizer takes any encoding.
Text load_text_file(const std::filesystem::path& file);
// The same of a file's bytes; `name` is the text's name and names it in messages.
Text text_of_bytes(std::string bytes, const std::string& name);

}  // namespace tessera
