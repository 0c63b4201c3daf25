// A tokenizer's JSON file: an accepted one decodes every token, encodes it back, and round-trips.
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("tokenizer", [](std::string_view bytes) {
  const std::unique_ptr<Tokenizer> tokenizer = Tokenizer::from_json(bytes, kWhat);
  const std::string written = tokenizer->to_json();
  require(Tokenizer::from_json(written, kWhat)->to_json() == written, "a tokenizer round-trips");
  if (tokenizer->kind() == "hub") return;  // hub_tokenizer_target.cpp
  std::vector<int32_t> tokens(static_cast<size_t>(tokenizer->vocab_size()));
  std::iota(tokens.begin(), tokens.end(), 0);
  const std::string text = tokenizer->decode(tokens);
  const std::vector<int32_t> back = tokenizer->encode(text);
  // A bpe tokenizer preserves the text, not the tokens: merges may join adjacent ones.
  require(tokenizer->kind() == "bpe" ? tokenizer->decode(back) == text : back == tokens, "text round-trips");
});

}  // namespace tessera::fuzz
