// Reading a plain text file.
#include "data/text_file.h"

#include <fmt/format.h>

#include "data/compressed.h"
#include "tensor/error.h"

namespace tessera {

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
