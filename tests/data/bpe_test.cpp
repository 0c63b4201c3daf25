// Byte-level BPE: alphabet, pieces, training and encoding against naive implementations, files.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer/described.h"
#include "tests/data/bpe_texts.h"
#include "tests/data/support.h"
#include "tests/support/python.h"

namespace tessera {
namespace {

std::vector<std::string> pieces(std::string_view text) {
  std::vector<std::string> out;
  bpe::for_each_piece(text, [&](std::string_view piece) { out.emplace_back(piece); });
  return out;
}
using Pieces = std::vector<std::string>;

std::string random_bytes(uint64_t length, uint64_t seed, uint64_t kinds) {
  const Philox random = Philox::named(seed, "bytes");
  std::string out;
  for (uint64_t i = 0; i < length; ++i) out += static_cast<char>(random.below(kinds, i));
  return out;
}

TEST(BpeAlphabet, RoundTripsEveryByte) {
  std::string all;
  for (int b = 0; b < 256; ++b) all += static_cast<char>(b);
  EXPECT_EQ(bpe::unspell(bpe::spell(all)), all);
  EXPECT_EQ(bpe::spell(" a\n\x7F\xAD"), "\u0120a\u010A\u0121\u0143");
  EXPECT_EQ(bpe::unspell(" "), std::nullopt);
  EXPECT_EQ(bpe::unspell("\xC5\x84"), std::nullopt);  // after the last character
  EXPECT_EQ(bpe::unspell("\xFF"), std::nullopt);
  EXPECT_EQ(bpe::bytes_in_order()[0], '!');
  EXPECT_EQ(bpe::bytes_in_order()[188], 0);
  EXPECT_EQ(bpe::bytes_in_order()[255], 0xAD);
}

TEST(BpePretokenizer, MatchesGpt2) {
  EXPECT_EQ(pieces("Hello, it's 12 o'clock"), (Pieces{"Hello", ",", " it", "'s", " 12", " o", "'", "clock"}));
  EXPECT_EQ(pieces("a  b\n\n c \n"), (Pieces{"a", " ", " b", "\n\n", " c", " \n"}));
  EXPECT_EQ(pieces("we'll WE'LL"), (Pieces{"we", "'ll", " WE", "'", "LL"}));
  EXPECT_EQ(pieces("x\xC2\xB2\xE2\x85\xA3"), (Pieces{"x", "\xC2\xB2\xE2\x85\xA3"}));        // both are numbers
  EXPECT_EQ(pieces("a\u180Eb"), (Pieces{"a", "\xE1\xA0\x8E", "b"}));                        // U+180E is not a space
  EXPECT_EQ(pieces("a\u2003\u2003b"), (Pieces{"a", "\xE2\x80\x83", "\xE2\x80\x83", "b"}));  // U+2003 is a space
  EXPECT_EQ(pieces("S[^S]"), (Pieces{"S", "[^", "S", "]"}));
  EXPECT_EQ(pieces(""), Pieces{});
  // Each run of invalid bytes is a separate piece.
  EXPECT_EQ(pieces("a\xFF\376b \xC3"), (Pieces{"a", "\xFF\xFE", "b", " ", "\xC3"}));
  EXPECT_EQ(pieces("\xED\xA0\x80"), (Pieces{"\xED\xA0\x80"}));  // a surrogate
}

TEST(BpePretokenizer, PretokensConcatenateToTheText) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const std::string text = random_bytes(2000, seed, seed % 2 == 0 ? 256 : 128);
    std::string joined;
    for (const std::string& piece : pieces(text)) joined += piece;
    ASSERT_EQ(joined, text) << seed;
  }
}

TEST(BpePretokenizer, SplitsTenMegabytes) {
  for (const char c : {'a', ' ', '\n', '\xFF'}) ASSERT_EQ(pieces(std::string(10'000'000, c)).size(), 1U) << c;
}

std::vector<std::string> byte_tokens() {
  std::vector<std::string> out;
  for (const uint8_t b : bpe::bytes_in_order()) out.emplace_back(1, static_cast<char>(b));
  return out;
}

// The id of each token.
using Numbers = std::map<std::string, int32_t>;
Numbers to_numbers(const std::vector<std::string>& tokens) {
  Numbers out;
  for (size_t i = 0; i < tokens.size(); ++i) out[tokens[i]] = static_cast<int32_t>(i);
  return out;
}

// The pieces of a text, with one token per byte.
std::vector<std::vector<int32_t>> find_words(std::string_view text, const Numbers& ids) {
  std::vector<std::vector<int32_t>> out;
  for (const std::string& piece : pieces(text)) {
    out.emplace_back();
    for (const char c : piece) out.back().push_back(ids.at(std::string(1, c)));
  }
  return out;
}

// Merges every occurrence of a pair.
void join(std::vector<int32_t>& word, int32_t left, int32_t right, int32_t joined) {
  for (size_t i = 0; i + 1 < word.size(); ++i)
    if (word[i] == left && word[i + 1] == right) {
      word[i] = joined;
      word.erase(word.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    }
}

// Naive training: count all pairs, merge the most frequent, repeat.
BpeTokenizer reference_training(std::string_view text, int64_t vocab, int64_t min_frequency) {
  std::vector<std::string> tokens = byte_tokens();
  Numbers ids = to_numbers(tokens);
  std::vector<std::vector<int32_t>> words = find_words(text, ids);
  std::vector<BpeTokenizer::Merge> merges;
  while (static_cast<int64_t>(tokens.size()) < vocab) {
    std::map<std::pair<int32_t, int32_t>, int64_t> counts;
    for (const auto& w : words)
      for (size_t i = 0; i + 1 < w.size(); ++i) ++counts[{w[i], w[i + 1]}];
    const auto best = std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) {
      return a.second != b.second ? a.second < b.second : a.first > b.first;
    });
    if (best == counts.end() || best->second < min_frequency) break;
    const auto [left, right] = best->first;
    const std::string joined = tokens[static_cast<size_t>(left)] + tokens[static_cast<size_t>(right)];
    const auto [place, added] = ids.emplace(joined, static_cast<int32_t>(tokens.size()));
    if (added) tokens.push_back(joined);
    merges.push_back({left, right});
    for (auto& w : words) join(w, left, right, place->second);
  }
  return {tokens, merges, "plain"};
}

// Naive encoding: merge the leftmost pair of lowest rank until none is left.
std::vector<int32_t> reference_encoding(const BpeTokenizer& t, std::string_view text) {
  const Numbers ids = to_numbers(t.tokens());
  std::vector<int32_t> out;
  for (std::vector<int32_t>& w : find_words(text, ids)) {
    for (const auto& [left, right] : t.merges())
      join(w, left, right, ids.at(t.tokens()[static_cast<size_t>(left)] + t.tokens()[static_cast<size_t>(right)]));
    out.insert(out.end(), w.begin(), w.end());
  }
  return out;
}

TEST(BpeTokenizer, TrainingAndEncodingMatchNaiveAlgorithm) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const std::string text = seed % 3 == 0   ? random_bytes(600, seed, 256)
                             : seed % 3 == 1 ? "aaaa " + random_bytes(600, seed, 100)
                                             : test::mixed_text().substr(seed * 97, 700);
    const int64_t min_frequency = 1 + static_cast<int64_t>(seed % 4);
    const BpeTokenizer ours = train_bpe(text, {.vocab_size = 420, .min_count = min_frequency});
    const BpeTokenizer plain = reference_training(text, 420, min_frequency);
    ASSERT_EQ(ours.tokens(), plain.tokens());
    ASSERT_EQ(ours.merges_txt(), plain.merges_txt());
    for (const std::string& other : {text, random_bytes(500, seed + 100, 256), test::mixed_text().substr(300, 900)}) {
      const std::vector<int32_t> tokens = ours.encode(other);
      ASSERT_EQ(tokens, reference_encoding(ours, other));
      ASSERT_EQ(ours.decode(tokens), other);
    }
  }
}

TEST(BpeTokenizer, RoundTripsThroughItsFiles) {
  const BpeTokenizer t = train_bpe(test::mixed_text(), {.vocab_size = 1000});
  ASSERT_EQ(t.vocab_size(), 1000);
  const std::string text = test::unseen_text();
  const std::vector<int32_t> tokens = t.encode(text);
  EXPECT_LT(t.encode(test::mixed_text()).size(), test::mixed_text().size() / 3);
  const BpeTokenizer files = BpeTokenizer::parse_files(t.vocab_json(), t.merges_txt(), "vocab.json", "merges.txt");
  EXPECT_EQ(files.encode(text), tokens);
  std::string crlf = t.merges_txt();  // as Windows checks it out
  for (size_t at = 0; (at = crlf.find('\n', at)) != std::string::npos; at += 2) crlf.insert(at, 1, '\r');
  EXPECT_EQ(BpeTokenizer::parse_files(t.vocab_json(), crlf, "vocab.json", "merges.txt").encode(text), tokens);
  const std::unique_ptr<Tokenizer> json = Tokenizer::from_json(t.to_json(), "tokenizer.json");
  EXPECT_EQ(json->kind(), "bpe");
  EXPECT_EQ(json->encode(text), tokens);
  EXPECT_EQ(json->to_json(), t.to_json());
  const HubTokenizer hub({{"tokenizer.json", t.files().at("tokenizer.json")}}, "t");
  EXPECT_EQ(hub.encode(text), tokens);
  EXPECT_EQ(hub.decode(tokens), text);
}

// The 256 bytes and further tokens in the format of vocab.json.
std::string vocabulary(const std::vector<std::string>& more) {
  std::vector<std::string> tokens = byte_tokens();
  tokens.insert(tokens.end(), more.begin(), more.end());
  return BpeTokenizer(tokens, {}, "t").vocab_json();
}

TEST(BpeTokenizer, DecodesButNeverEncodesSpecialTokens) {
  const BpeTokenizer t = BpeTokenizer::parse_files(vocabulary({"th", "<|endoftext|>"}), "#version: 0.2\nt h\n",
                                                   "vocab.json", "merges.txt");
  EXPECT_EQ(t.encode("th<|endoftext|>").size(), 14U);
  EXPECT_EQ(t.encode("th"), std::vector<int32_t>{256});
  EXPECT_EQ(t.decode(std::vector<int32_t>{256, 257}), "th<|endoftext|>");
  EXPECT_EQ(t.document_end(), 257);
  EXPECT_EQ(HubTokenizer({{"tokenizer.json", t.files().at("tokenizer.json")}}, "t").document_end(), 257);
  EXPECT_FALSE(train_bpe(test::mixed_text(), {.vocab_size = 300}).document_end());
  EXPECT_FALSE(ByteTokenizer().document_end());
  expect_error(Status::usage, {"token 258", "vocabulary of 258"}, [&] { t.decode(std::vector<int32_t>{258}); });
}

TEST(BpeTokenizer, RejectsInconsistentFiles) {
  const auto refuse = [](const std::string& vocab, const std::string& merges,
                         std::initializer_list<std::string> parts) {
    expect_error(Status::input, parts, [&] { BpeTokenizer::parse_files(vocab, merges, "v.json", "m.txt"); });
  };
  const std::string good = vocabulary({"th", "the"});
  refuse("[]", "", {"v.json", "expected an object that maps tokens to ids"});
  refuse("{\"a\":0", "", {"v.json", "not valid JSON"});
  refuse(R"({"a":0,"a":1})", "", {"v.json", "'a'", "duplicate key"});
  refuse(R"({"a":0})", "", {"v.json", "no token for the byte 0x00"});
  refuse(R"({"a":1})", "", {"v.json", "'a' has the id 1", "0 to 0"});
  refuse(R"({"a":0,"b":0})", "", {"v.json", "has the id 0"});
  refuse(R"({"a":-1})", "", {"v.json", "-1"});
  refuse(R"({"a":"x"})", "", {"v.json", "\"x\""});
  refuse(R"({"":0})", "", {"v.json", "token 0 is empty"});
  refuse(good, "t h\nt h\n", {"v.json", "merge 1", "twice"});
  refuse(good, "t h e\n", {"m.txt", "line 1", "one space"});
  refuse(good, "t h\n\n", {"m.txt", "line 2"});
  refuse(good, "#version: 0.2\nt h\nth x\n", {"merge 1", "'thx'", "not a token"});
  refuse(good, "t qq\n", {"m.txt", "line 1", "'qq'", "not a token"});
  BpeTokenizer::parse_files(good, "t h\nth e", "v.json", "m.txt");  // the last line need not be terminated
  expect_error(Status::usage, {"`vocab`", "256", "100"}, [] { train_bpe("text", {.vocab_size = 100}); });
}

// Tessera's byte-level BPE against HF tokenizers: training produces the same merges, encoding the same tokens, and each
// reads the other's files.

// Lossy UTF-8 decoding of Python and Rust: each maximal invalid subpart becomes U+FFFD. Tessera retains the bytes.
constexpr const char* kBroken = "a\xFF\xFE b \xE2\x82 c \xF0\x9F\x98 \xC3";
constexpr const char* kBrokenShown = "a\xEF\xBF\xBD\xEF\xBF\xBD b \xEF\xBF\xBD c \xEF\xBF\xBD \xEF\xBF\xBD";

TEST(BpeTokenizer, TrainingAndEncodingMatchHfTokenizers) {
  if (const std::string why = test::missing("tokenizers"); !why.empty()) GTEST_SKIP() << why;
  const std::string text = test::mixed_text();
  for (const auto& [vocab, min_frequency] : {std::pair<int64_t, int64_t>{700, 2}, {4000, 2}, {4000, 5}}) {
    SCOPED_TRACE(testing::Message() << "vocabulary " << vocab << ", least count " << min_frequency);
    const test::Exchange exchange;
    const BpeTokenizer ours = train_bpe(text, {.vocab_size = vocab, .min_count = min_frequency});
    make_directories(exchange.path("ours"));
    exchange.write_text("ours/vocab.json", ours.vocab_json());
    exchange.write_text("ours/merges.txt", ours.merges_txt());
    exchange.write_text("train.txt", text);
    const std::string unseen = test::unseen_text();
    exchange.write_text("text.txt", unseen);
    const std::vector<int32_t> broken = ours.encode(kBroken);
    exchange.write("broken.ids", std::span<const int32_t>(broken));
    exchange.run(std::string(TESSERA_SOURCE_DIR) + "/tests/compare/bpe_tokenizers.py",
                 std::to_string(vocab) + " " + std::to_string(min_frequency));

    const BpeTokenizer theirs = BpeTokenizer::load_files(exchange.path("theirs"));
    EXPECT_EQ(theirs.tokens(), ours.tokens());
    EXPECT_EQ(theirs.merges_txt(), ours.merges_txt());
    EXPECT_EQ(theirs.encode(unseen), exchange.read<int32_t>("theirs.ids"));
    EXPECT_EQ(ours.encode(unseen), exchange.read<int32_t>("ours.ids"));
    EXPECT_EQ(read_file(exchange.path("broken.txt")), kBrokenShown);
    EXPECT_EQ(ours.decode(broken), kBroken);
  }
}

// The files of Tessera's own tokenizers, read by the library and by Tessera's reader of such files.
TEST(ExportedTokenizers, TokensMatchHfTokenizers) {
  if (const std::string why = test::missing("tokenizers"); !why.empty()) GTEST_SKIP() << why;
  const std::string text = test::mixed_text() + test::unseen_text() + " \xE2\x96\x81 <0x0A> </s> <|endoftext|>\r\n";
  std::vector<std::unique_ptr<Tokenizer>> all;
  all.push_back(std::make_unique<ByteTokenizer>());
  all.push_back(std::make_unique<CharTokenizer>(CharTokenizer::from_text(text, "t")));
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

// Tokenizers of published kinds on a text in many scripts: tokens and decoded text equal those of the library.
TEST(HubTokenizers, TokensMatchHfTokenizersInManyScripts) {
  if (const std::string why = test::missing("tokenizers"); !why.empty()) GTEST_SKIP() << why;
  const test::Exchange exchange;
  // The library needs two minutes for 3 MB, the size set by TESSERA_COMPARE_BYTES=3000000.
  const char* const bytes = std::getenv("TESSERA_COMPARE_BYTES");
  exchange.run(std::string(TESSERA_SOURCE_DIR) + "/tests/compare/library_patterns.py", bytes ? bytes : "300000");
  const std::string text = read_file(exchange.path("text.txt"));
  std::istringstream times(read_file(exchange.path("milliseconds.txt")));
  int found = 0;
  for (std::string name, theirs; times >> name >> theirs; ++found) {
    SCOPED_TRACE(name);
    const auto tokenizer = Tokenizer::open_folder(exchange.path(name));
    const auto began = std::chrono::steady_clock::now();
    const std::vector<int32_t> tokens = tokenizer->encode(text);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - began;
    std::printf("%-10s %7zu tokens, %4.0f ms; the library %s ms\n", name.c_str(), tokens.size(), took.count(),
                theirs.c_str());
    const auto right = exchange.read<int32_t>(name + "/ids");
    const std::span same(right.begin(), std::ranges::mismatch(right, tokens).in1);
    EXPECT_TRUE(right == tokens) << "from token " << same.size() << " on, after '"
                                 << tokenizer->decode(same.last(std::min<size_t>(20, same.size()))) << "'";
    const std::string decoded = replace_broken(tokenizer->decode(right)),
                      theirs_decoded = read_file(exchange.path(name + "/decoded.txt"));
    const auto at = static_cast<size_t>(std::ranges::mismatch(decoded, theirs_decoded).in1 - decoded.begin());
    EXPECT_TRUE(decoded == theirs_decoded)
        << "'" << decoded.substr(at, 40) << "', the library '" << theirs_decoded.substr(at, 40) << "'";
  }
  EXPECT_EQ(found, 14);
}

}  // namespace
}  // namespace tessera
