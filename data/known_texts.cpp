// Built-in texts, a separate file so that only programs that link it embed them (cmake/tessera_embed.cmake).
#include <fmt/format.h>
#include <zstd.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "data/text.h"

extern "C" const char tessera_austen_begin[], tessera_austen_end[];
extern "C" const char tessera_tinyshakespeare_begin[], tessera_tinyshakespeare_end[];

namespace tessera {
namespace {

// The frame has a checksum; `documents`: sizes in bytes.
Text unpacked(std::string_view name, std::string_view packed, std::initializer_list<int64_t> documents) {
  std::vector<Span> spans;
  for (const int64_t size : documents) {
    const int64_t begin = spans.empty() ? 0 : spans.back().end;
    spans.push_back({begin, begin + size});
  }
  std::string bytes(static_cast<size_t>(spans.back().end), '\0');
  if (ZSTD_decompress(bytes.data(), bytes.size(), packed.data(), packed.size()) != bytes.size())
    throw Error(fmt::format("`data` {}: the embedded copy is corrupt", name), Status::verification);
  return text_of_bytes(std::move(bytes), std::string(name), std::move(spans));
}

}  // namespace

std::optional<Text> builtin_text(std::string_view name) {
  // Emma, Mansfield Park, Northanger Abbey, Persuasion, Pride and Prejudice, Sense and Sensibility.
  if (name == "austen")
    return unpacked(name, {tessera_austen_begin, tessera_austen_end},
                    {883'028, 883'280, 433'411, 466'854, 684'768, 673'688});
  if (name == "tinyshakespeare")
    return unpacked(name, {tessera_tinyshakespeare_begin, tessera_tinyshakespeare_end}, {1'115'394});
  return std::nullopt;
}

}  // namespace tessera
