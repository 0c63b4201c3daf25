// Helpers of the data layer's tests: a scratch directory, a private cache, and the message of an error.
#pragma once

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "data/files.h"
#include "data/text.h"
#include "tests/support/errors.h"

namespace tessera {

// A tokenizer of some words, and of <|im_start|> and <|im_end|> as the special tokens 400 and 401.
inline nlohmann::json chat_tokenizer() {
  nlohmann::json made =
      nlohmann::json::parse(read_file(TESSERA_SOURCE_DIR "/tests/data/fixtures/tokenizers/smollm/tokenizer.json"));
  for (nlohmann::json& token : made["added_tokens"]) {
    if (token["id"] == 400) token["content"] = "<|im_start|>", token["special"] = true;
    if (token["id"] == 401) token["content"] = "<|im_end|>", token["special"] = true;
  }
  return made;
}

// A scratch directory, with the cache inside it, for one test.
class DataTest : public testing::Test {
 protected:
  DataTest() { ::setenv("TESSERA_CACHE", (scratch_.path() / "cache").c_str(), 1); }
  ~DataTest() override { ::unsetenv("TESSERA_CACHE"); }

  std::filesystem::path path(const std::string& name) const { return scratch_.path() / name; }
  std::filesystem::path file(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }

 private:
  TemporaryDirectory scratch_{std::filesystem::temp_directory_path() / "tessera-test-"};
};

// Both parts of a text.
struct TextParts {
  std::string train = {}, val = {};
};
inline TextParts parts_of(const Text& text) {
  TextParts out;
  split_text(text, {}, [&](std::string_view piece, bool held) { (held ? out.val : out.train) += piece; });
  return out;
}

}  // namespace tessera
