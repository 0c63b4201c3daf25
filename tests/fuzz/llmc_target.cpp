// llm.c's token files: what is accepted has as many tokens as the bytes hold, each inside the vocabulary.
#include "data/token_file.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("llmc", [](std::string_view bytes) {
  constexpr int64_t kVocab = 50257;
  const std::vector<int32_t> tokens = TokenFile::of_llmc_bytes(bytes_of(bytes), kVocab, kWhat).all();
  require(1024 + 2 * tokens.size() == bytes.size() || 1024 + 4 * tokens.size() == bytes.size(), "all bytes are used");
  for (const int32_t t : tokens) require(t >= 0 && t < kVocab, "a token is inside the vocabulary");
});

}  // namespace tessera::fuzz
