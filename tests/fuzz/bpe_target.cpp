// vocab.json and merges.txt, separated by a line "%": accepted files encode and decode any bytes and round-trip.
#include <string_view>

#include "data/tokenizer/described.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {
const Target target("bpe", [](std::string_view bytes) {
  std::string_view merges = bytes;
  const std::string_view vocab = take(merges);
  const BpeTokenizer tokenizer = BpeTokenizer::parse_files(vocab, merges, kWhat, kWhat);
  require(tokenizer.decode(tokenizer.encode(bytes)) == bytes, "bytes round-trip through tokens");
  const BpeTokenizer again = BpeTokenizer::parse_files(tokenizer.vocab_json(), tokenizer.merges_txt(), kWhat, kWhat);
  require(again.encode(bytes) == tokenizer.encode(bytes), "the written files encode identically");
});

}  // namespace tessera::fuzz
