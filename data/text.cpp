// The train/validation split of a text.
#include "data/text.h"

#include <fmt/format.h>

#include "data/jsonl.h"
#include "tensor/error.h"

namespace tessera {

Text one_document(std::string name, std::string bytes) {
  const Span all{0, std::ssize(bytes)};
  return {std::move(name), std::move(bytes), {all}};
}

Split split_text(const Text& text) {
  Split split;
  for (const Span& d : text.documents) {
    int64_t cut = d.begin + (d.end - d.begin) * 9 / 10;
    while (cut < d.end && (static_cast<uint8_t>(text.bytes[static_cast<size_t>(cut)]) & 0xC0u) == 0x80u) ++cut;
    split.train.append(text.bytes, static_cast<size_t>(d.begin), static_cast<size_t>(cut - d.begin));
    split.val.append(text.bytes, static_cast<size_t>(cut), static_cast<size_t>(d.end - cut));
  }
  if (split.train.size() < 2 || split.val.size() < 2)
    throw InputError(fmt::format(
        "data '{}': a text of {} bytes is too short; its last tenth, held out for validation, needs at least 2 bytes",
        text.name, text.bytes.size()));
  return split;
}

// Reading a plain text file.

Text load_text_file(const std::filesystem::path& file) { return text_of_bytes(read_text(file), file.string()); }

Text text_of_bytes(std::string bytes, const std::string& name) {
  if (bytes.empty()) throw InputError(fmt::format("{} is empty; expected a text", name));
  const size_t nul = bytes.find('\0');
  if (nul != std::string::npos)
    throw InputError(fmt::format("{} is binary (a NUL byte at offset {}); expected a text", name, nul));
  if (bytes.starts_with("\xEF\xBB\xBF")) bytes.erase(0, 3);
  if (bytes.empty()) throw InputError(fmt::format("{} holds only a byte order mark; expected a text", name));
  return one_document(name, std::move(bytes));
}

}  // namespace tessera
