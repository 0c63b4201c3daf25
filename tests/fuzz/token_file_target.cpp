// Token files. Fuzzers do not guess checksums, so the bytes are parsed a second time with the correct one inserted.
#include <xxhash.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "data/token_file.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {
namespace {

constexpr size_t kHeader = 64, kHashAt = 32;

void read_all(std::span<const std::byte> bytes) {
  const TokenFile file = TokenFile::from_bytes(bytes, kWhat);
  std::vector<int32_t> tokens(static_cast<size_t>(file.size()));
  file.copy(0, file.size(), tokens.data());
  for (const int32_t t : tokens) require(t >= 0 && t < file.vocab_size(), "a token is inside the vocabulary");
}

}  // namespace

const Target target("token_file", [](std::string_view text) {
  std::vector<std::byte> bytes(text.size());  // aligned for the tokens
  if (!text.empty()) std::memcpy(bytes.data(), text.data(), text.size());
  if (bytes.size() >= kHeader) {
    std::vector<std::byte> mended = bytes;
    const uint64_t hash = XXH3_64bits(mended.data() + kHeader, mended.size() - kHeader);
    std::memcpy(mended.data() + kHashAt, &hash, sizeof(hash));
    accepts([](std::string_view m) { read_all(as_bytes(m)); },
            {reinterpret_cast<const char*>(mended.data()), mended.size()});
  }
  read_all(bytes);
});

}  // namespace tessera::fuzz
