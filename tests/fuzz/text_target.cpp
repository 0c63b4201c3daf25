// A text file on its way to tokens: the split loses nothing, and the characters round-trip.
#include <string>
#include <string_view>

#include "data/text.h"
#include "data/tokenizer/described.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("text", [](std::string_view bytes) {
  const Text text = text_of_bytes(std::string(bytes), kWhat);
  std::string train, val;
  split_text(text, {}, [&](std::string_view chunk, bool held) { (held ? val : train) += chunk; });
  require(train + val == text.bytes(), "the splits of one document form the text");
  const CharTokenizer tokenizer = CharTokenizer::from_text(text.bytes(), kWhat);
  require(tokenizer.decode(tokenizer.encode(train)) == train, "the training split round-trips");
  require(tokenizer.decode(tokenizer.encode(val)) == val, "the validation split round-trips");
});

}  // namespace tessera::fuzz
