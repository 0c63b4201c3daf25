// Helpers of the data layer's tests: a scratch directory, a private cache, a full disk, token fixtures, and error
// messages.
#pragma once

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"
#include "data/loader.h"
#include "data/text.h"
#include "tests/support/errors.h"

namespace tessera {

// Hugging Face tokenizers made by tests/data/fixtures/make_tokenizers.py.
inline constexpr std::array kTokenizers{"gpt2", "roberta", "llama3", "qwen", "smollm", "llama2", "mistral", "words"};
inline std::filesystem::path tokenizer_fixture(const std::string& name) {
  return TESSERA_SOURCE_DIR "/tests/data/fixtures/tokenizers/" + name;
}

// A tokenizer with a small vocabulary, and with <|im_start|> and <|im_end|> as the special tokens 400 and 401.
inline nlohmann::json chat_tokenizer() {
  nlohmann::json made = nlohmann::json::parse(read_file(tokenizer_fixture("smollm") / "tokenizer.json"));
  for (nlohmann::json& token : made["added_tokens"]) {
    if (token["id"] == 400) token["content"] = "<|im_start|>", token["special"] = true;
    if (token["id"] == 401) token["content"] = "<|im_end|>", token["special"] = true;
  }
  return made;
}

// A scratch directory that contains the cache, for one test.
class DataTest : public testing::Test {
 protected:
  DataTest() { ::setenv("TESSERA_CACHE", (scratch_.path() / "cache").c_str(), 1); }
  ~DataTest() override { ::unsetenv("TESSERA_CACHE"); }

  std::filesystem::path path(const std::string& name) const { return scratch_.path() / name; }
  std::filesystem::path file(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  // An existing empty directory.
  std::filesystem::path emptied(const std::string& name) const {
    std::filesystem::remove_all(path(name));
    std::filesystem::create_directory(path(name));
    return path(name);
  }
  // The sorted names in a directory.
  static std::vector<std::string> names_in(const std::filesystem::path& folder) {
    std::vector<std::string> out;
    for (const auto& e : std::filesystem::directory_iterator(folder)) out.push_back(e.path().filename().string());
    std::ranges::sort(out);
    return out;
  }
  // Expects the action to fail, naming this file, in a process with this limit on file sizes, as on a full disk.
  static void expect_full_disk(uint64_t bytes, const std::string& named, const std::function<void()>& action) {
    const pid_t child = fork();
    if (child == 0) {
      signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{bytes, bytes};
      setrlimit(RLIMIT_FSIZE, &limit);
      try {
        action();
      } catch (const OutputError& e) {
        _exit(has(e.what(), named) && !HasFailure() ? 0 : 2);
      }
      _exit(1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }

 private:
  TemporaryDirectory scratch_{std::filesystem::temp_directory_path() / "tessera-test-"};
};

inline std::vector<int32_t> read_tokens(const TokenFile& file) {
  std::vector<int32_t> out(static_cast<size_t>(file.size()));
  file.copy(0, file.size(), out.data());
  return out;
}

// Both splits of a text.
struct TextParts {
  std::string train = {}, val = {};
};
inline TextParts split_text(const Text& text) {
  TextParts out;
  split_text(text, {}, [&](std::string_view piece, bool held) { (held ? out.val : out.train) += piece; });
  return out;
}

}  // namespace tessera
