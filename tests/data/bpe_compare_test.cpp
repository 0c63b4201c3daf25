// Our byte-level BPE beside that of HF tokenizers: the same merges learnt, the same tokens, each reading the other's
// files.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <sstream>

#include "data/files.h"
#include "data/tokenizer/described.h"
#include "tests/data/bpe_texts.h"
#include "tests/support/python.h"

namespace tessera {
namespace {

// Python's and Rust's lossy reading of UTF-8: each maximal broken part becomes U+FFFD. Ours has the bytes.
constexpr const char* kBroken = "a\xFF\xFE b \xE2\x82 c \xF0\x9F\x98 \xC3";
constexpr const char* kBrokenShown = "a\xEF\xBF\xBD\xEF\xBF\xBD b \xEF\xBF\xBD c \xEF\xBF\xBD \xEF\xBF\xBD";

TEST(BpeBesideHfTokenizers, LearnsAndEncodesTheSame) {
  if (const std::string why = test::missing("tokenizers"); !why.empty()) GTEST_SKIP() << why;
  const std::string text = test::mixed_text();
  for (const auto& [vocab, least] : {std::pair<int64_t, int64_t>{700, 2}, {4000, 2}, {4000, 5}}) {
    SCOPED_TRACE(testing::Message() << "vocabulary " << vocab << ", least count " << least);
    const test::Exchange exchange;
    const BpeTokenizer ours = train_bpe(text, {.vocab_size = vocab, .least_count = least});
    make_directories(exchange.path("ours"));
    exchange.write_text("ours/vocab.json", ours.vocab_json());
    exchange.write_text("ours/merges.txt", ours.merges_txt());
    exchange.write_text("train.txt", text);
    const std::string unseen = test::unseen_text();
    exchange.write_text("text.txt", unseen);
    const std::vector<int32_t> broken = ours.encode(kBroken);
    exchange.write("broken.ids", std::span<const int32_t>(broken));
    exchange.run(std::string(TESSERA_SOURCE_DIR) + "/tests/compare/bpe_tokenizers.py",
                 std::to_string(vocab) + " " + std::to_string(least));

    const BpeTokenizer theirs = BpeTokenizer::load_files(exchange.path("theirs"));
    EXPECT_EQ(theirs.tokens(), ours.tokens());
    EXPECT_EQ(theirs.merges_txt(), ours.merges_txt());
    EXPECT_EQ(theirs.encode(unseen), exchange.read<int32_t>("theirs.ids"));
    EXPECT_EQ(ours.encode(unseen), exchange.read<int32_t>("ours.ids"));
    EXPECT_EQ(read_file(exchange.path("broken.txt")), kBrokenShown);
    EXPECT_EQ(ours.decode(broken), kBroken);
  }
}

// The files of our own tokenizers, read by the library and by our reader of such files.
TEST(OwnTokenizersInTheLibrary, HaveTheSameTokens) {
  if (const std::string why = test::missing("tokenizers"); !why.empty()) GTEST_SKIP() << why;
  const std::string text = test::mixed_text() + test::unseen_text() + " \xE2\x96\x81 <0x0A> </s> <|endoftext|>\r\n";
  std::vector<std::unique_ptr<Tokenizer>> all;
  all.push_back(std::make_unique<ByteTokenizer>());
  all.push_back(std::make_unique<CharTokenizer>(CharTokenizer::of_text(text, "t")));
  all.push_back(std::make_unique<BpeTokenizer>(train_bpe(test::mixed_text(), {.vocab_size = 800})));
  for (const auto& tokenizer : all) {
    SCOPED_TRACE(tokenizer->kind());
    const test::Exchange exchange;
    for (const auto& [name, content] : tokenizer->files()) exchange.write_text(name, content);
    exchange.write_text("text.txt", text);
    exchange.run(std::string(TESSERA_SOURCE_DIR) + "/tests/compare/library_tokens.py");
    const std::vector<int32_t> tokens = tokenizer->encode(text);
    EXPECT_EQ(exchange.read<int32_t>("ids"), tokens);
    EXPECT_EQ(read_file(exchange.path("decoded.txt")), text);
    const auto again = Tokenizer::open_folder(exchange.path(""));
    EXPECT_EQ(again->kind(), "hub");
    EXPECT_EQ(again->encode(text), tokens);
    EXPECT_EQ(again->decode(tokens), text);
    EXPECT_EQ(again->identity(), tokenizer->identity());
  }
}

// Tokenizers of published kinds on a text in many scripts: the library's tokens, and its text when it decodes them.
TEST(PatternsBesideHfTokenizers, MakeTheSameTokens) {
  if (const std::string why = test::missing("tokenizers"); !why.empty()) GTEST_SKIP() << why;
  const test::Exchange exchange;
  // The library needs two minutes for 3 MB, which TESSERA_COMPARE_BYTES=3000000 asks for.
  const char* const bytes = std::getenv("TESSERA_COMPARE_BYTES");
  exchange.run(std::string(TESSERA_SOURCE_DIR) + "/tests/compare/library_patterns.py", bytes ? bytes : "300000");
  const std::string text = read_file(exchange.path("text.txt"));
  std::istringstream times(read_file(exchange.path("milliseconds.txt")));
  int met = 0;
  for (std::string name, theirs; times >> name >> theirs; ++met) {
    SCOPED_TRACE(name);
    const auto tokenizer = Tokenizer::open_folder(exchange.path(name));
    const auto began = std::chrono::steady_clock::now();
    const std::vector<int32_t> tokens = tokenizer->encode(text);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - began;
    std::printf("%-10s %7zu tokens, %4.0f ms; the library %s ms\n", name.c_str(), tokens.size(), took.count(),
                theirs.c_str());
    const auto right = exchange.read<int32_t>(name + "/ids");
    const auto differs = std::mismatch(right.begin(), right.end(), tokens.begin(), tokens.end());
    EXPECT_TRUE(right == tokens) << "from token " << differs.first - right.begin() << " on, behind '"
                                 << tokenizer->decode(std::span(right.begin(), differs.first)
                                                          .last(std::min<size_t>(
                                                              20, static_cast<size_t>(differs.first - right.begin()))))
                                 << "'";
    const std::string decoded = replace_broken(tokenizer->decode(right)),
                      theirs_decoded = read_file(exchange.path(name + "/decoded.txt"));
    const auto at = std::mismatch(decoded.begin(), decoded.end(), theirs_decoded.begin(), theirs_decoded.end());
    EXPECT_TRUE(decoded == theirs_decoded)
        << "'" << std::string(at.first, std::min(at.first + 40, decoded.end())) << "', the library '"
        << std::string(at.second, std::min(at.second + 40, theirs_decoded.end())) << "'";
  }
  EXPECT_EQ(met, 14);
}

}  // namespace
}  // namespace tessera
