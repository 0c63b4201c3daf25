// A text file on its way to tokens: the split loses nothing, and the characters come back.
#include "data/text.h"
#include "data/tokenizer/described.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("text", [](std::string_view bytes) {
  Text text = text_of_bytes(std::string(bytes), kWhat);
  const Split split = split_text(text);
  require(split.train + split.val == text.bytes, "the parts of one document make the whole");
  const CharTokenizer tokenizer = CharTokenizer::of_text(text.bytes, kWhat);
  require(tokenizer.decode(tokenizer.encode(split.train)) == split.train, "the training part comes back");
  require(tokenizer.decode(tokenizer.encode(split.val)) == split.val, "the validation part comes back");
});

}  // namespace tessera::fuzz
