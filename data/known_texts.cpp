// The texts known by name, in a file of their own: a program that links it has their compressed bytes in it
// (cmake/tessera_embed.cmake), and others have not.
#include <fmt/format.h>
#include <zstd.h>

#include <array>
#include <span>

#include "data/text.h"
#include "tensor/error.h"

extern "C" const char tessera_austen_begin[], tessera_austen_end[];
extern "C" const char tessera_tinyshakespeare_begin[], tessera_tinyshakespeare_end[];

namespace tessera {
namespace {

// Emma, Mansfield Park, Northanger Abbey, Persuasion, Pride and Prejudice, Sense and Sensibility: bytes of each.
constexpr std::array<int64_t, 6> kNovels{883'028, 883'280, 433'411, 466'854, 684'768, 673'688};
constexpr std::array<int64_t, 1> kScenes{1'115'394};

struct Known {
  std::string_view name;
  const char *begin, *end;  // compressed by zstd, with a checksum
  std::span<const int64_t> documents;
};
const std::array<Known, 2> kTexts{
    {{"austen", tessera_austen_begin, tessera_austen_end, kNovels},
     {"tinyshakespeare", tessera_tinyshakespeare_begin, tessera_tinyshakespeare_end, kScenes}}};

}  // namespace

std::optional<Text> known_text(std::string_view name) {
  for (const Known& known : kTexts) {
    if (name != known.name) continue;
    Text text{std::string(name), {}, {}};
    int64_t end = 0;
    for (const int64_t size : known.documents) {
      text.documents.push_back({end, end + size});
      end += size;
    }
    text.bytes.resize(static_cast<size_t>(end));
    const auto packed = static_cast<size_t>(known.end - known.begin);
    if (ZSTD_decompress(text.bytes.data(), text.bytes.size(), known.begin, packed) != text.bytes.size())
      throw Error(fmt::format("`data` {}: the copy in the program is damaged", name), Status::verification);
    return text;
  }
  return std::nullopt;
}

}  // namespace tessera
