// A tokenizer.json of the library `tokenizers`: an accepted one encodes any bytes, round-trips, and decodes streams
// consistently. A tokenizer_config.json and the text follow, each after a line "%".
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.h"
#include "data/tokenizer/described.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {
const Target target("hub_tokenizer", [](std::string_view bytes) {
  const std::string json(take(bytes)), config(take(bytes));
  HubTokenizer::Files files{{"tokenizer.json", json}};
  if (!config.empty()) files.emplace("tokenizer_config.json", config);
  const HubTokenizer tokenizer(std::move(files), std::string(kWhat) + ": ");
  require(Tokenizer::from_json(tokenizer.to_json(), kWhat)->to_json() == tokenizer.to_json(), "it round-trips");
  for (const EncodeOptions& options :
       {EncodeOptions{}, {.special_in_text = true, .add_ends = true}, {.begins = false}}) {
    std::vector<int32_t> tokens;
    try {
      tokens = tokenizer.encode_with(bytes, options);
    } catch (const InputError&) {
      throw std::logic_error("a text is no file");
    } catch (const Error&) {
      continue;  // a character without a token
    }
    std::string full, streamed;
    StreamDecoder stream(tokenizer);
    for (const int32_t t : tokens) {
      full += tokenizer.token_bytes(t);
      streamed += stream.add(t);
    }
    streamed += stream.end();
    require(streamed == replace_broken(full), "streamed text equals decoded text");
    require(tokenizer.decode(tokens).size() <= full.size(), "decoding adds nothing");
  }
});

}  // namespace tessera::fuzz
