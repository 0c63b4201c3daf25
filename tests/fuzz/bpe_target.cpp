// vocab.json and merges.txt, with a line "%" between them: what is accepted encodes and decodes any bytes, and is
// written as it was read.
#include "data/tokenizer/described.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {
namespace {

BpeTokenizer parse(std::string_view vocab, std::string_view merges) {
  return BpeTokenizer::parse_files(vocab, merges, kWhat, kWhat);
}

}  // namespace

const Target target("bpe", [](std::string_view bytes) {
  constexpr std::string_view kBetween = "\n%\n";
  const size_t cut = std::min(bytes.find(kBetween), bytes.size());
  const std::string_view rest = bytes.substr(std::min(cut + kBetween.size(), bytes.size()));
  const BpeTokenizer tokenizer = parse(bytes.substr(0, cut), rest);
  require(tokenizer.decode(tokenizer.encode(bytes)) == bytes, "bytes survive the way to tokens and back");
  const BpeTokenizer again = parse(tokenizer.vocab_json(), tokenizer.merges_txt());
  require(again.encode(bytes) == tokenizer.encode(bytes), "files that were written encode alike");
});

}  // namespace tessera::fuzz
