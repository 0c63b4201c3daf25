// Reading a plain text file.
#include "data/text_file.h"

#include <fmt/format.h>

#include "data/files.h"
#include "tensor/error.h"

namespace tessera {

Text load_text_file(const std::filesystem::path& file) {
  std::string bytes = read_file(file);
  if (bytes.empty()) throw InputError(fmt::format("{} is empty; expected a text", file.string()));
  const size_t nul = bytes.find('\0');
  if (nul != std::string::npos)
    throw InputError(fmt::format("{} is binary (a NUL byte at offset {}); expected a text", file.string(), nul));
  if (bytes.starts_with("\xEF\xBB\xBF")) bytes.erase(0, 3);
  if (bytes.empty()) throw InputError(fmt::format("{} holds only a byte order mark; expected a text", file.string()));
  return one_document(file.string(), std::move(bytes));
}

}  // namespace tessera
