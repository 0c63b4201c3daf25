// llm.c's token files: an accepted file has as many tokens as its bytes hold, each in the vocabulary.
#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "data/token_file.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("llmc", [](std::string_view bytes) {
  constexpr int64_t kVocab = 50257;
  const TokenFile tokens = TokenFile::from_llmc_bytes(as_bytes(bytes), kVocab, kWhat);
  const int64_t payload = std::ssize(bytes) - 1024;
  require(2 * tokens.size() == payload || 4 * tokens.size() == payload, "all bytes are used");
  tokens.chunks(0, tokens.size(), [](std::span<const int32_t> some) {
    for (const int32_t t : some) require(t >= 0 && t < kVocab, "a token is inside the vocabulary");
  });
});

}  // namespace tessera::fuzz
