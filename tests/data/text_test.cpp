// Text files and their errors, UTF-8 and the split; token files; and long texts in little memory.

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/process.h"
#include "base/utf8.h"
#include "data/examples.h"
#include "data/tokenizer/described.h"
#include "tests/data/bpe_texts.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

using TextTest = DataTest;

TEST_F(TextTest, PreservesLineEndingsAndDropsByteOrderMark) {
  EXPECT_EQ(load_text_file(file("a", "one\r\ntwo\n")).bytes(), "one\r\ntwo\n");
  const Text text = load_text_file(file("b", "\xEF\xBB\xBFword"));
  EXPECT_EQ(text.bytes(), "word");
  ASSERT_EQ(text.documents.size(), 1u);
  EXPECT_EQ(text.documents[0].end, 4);
  const std::string line(10'000'000, 'x');
  EXPECT_EQ(load_text_file(file("long", line)).bytes().size(), line.size());
}

TEST_F(TextTest, RejectsNonTextFiles) {
  const auto refuse = [&](const std::string& name, std::initializer_list<std::string> parts) {
    expect_error(Status::input, parts, [&] { load_text_file(path(name)); });
  };
  refuse("absent", {"absent", "No such file"});
  const std::string raw("\x01\x00\x02\x00", 4), megatron("MMIDIDX\0\0", 9);
  file("mega.idx", megatron);
  const std::tuple<const char*, std::string, const char*> files[] = {
      {"empty", "", "empty is empty"},
      {"mark", "\xEF\xBB\xBF", "byte order mark"},
      {"binary", std::string("abc\0def", 7), "NUL byte at offset 3"},
      {"train.bin", raw, "token files without a header (nanoGPT)"},
      {"mega.bin", raw, "Megatron-LM"},
      {"foreign", std::string("\377\376a\0", 4), "UTF-16"},
      {"foreign", std::string("\xFE\xFF\0a", 4), "UTF-16"},
      {"foreign", megatron, "Megatron-LM"},
      {"foreign", "PAR1...", "Parquet"},
      {"foreign", "BZh91AY&SY...", "bzip2"},
      {"foreign", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"}};
  for (const auto& [name, bytes, is] : files) {
    file(name, bytes);
    refuse(name, {name, is});
  }
  expect_error(Status::input, {"foreign", "Git LFS pointer"}, [&] { MappedFile mapped(path("foreign")); });
  expect_error(Status::input, {"foreign", "Git LFS pointer"}, [&] { read_file(path("foreign")); });
  std::filesystem::create_directory(path("folder"));
  refuse("folder", {"folder is a directory"});
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  refuse("fifo", {"fifo", "not a regular file"});
  file("secret", "text");
  ASSERT_EQ(::chmod(path("secret").c_str(), 0), 0);
  if (::geteuid() != 0) refuse("secret", {"secret", "Permission denied"});
}

TEST(Utf8, RoundTripsCodePointsAndRejectsInvalidBytes) {
  for (char32_t c = 0; c <= 0x110000; ++c) {
    std::string bytes;
    append_utf8(bytes, c);
    size_t position = 0;
    const std::optional<char32_t> back = next_code_point(bytes, position);
    const bool valid = c <= 0x10FFFF && (c < 0xD800 || c > 0xDFFF);
    ASSERT_EQ(back.has_value(), valid) << static_cast<uint32_t>(c);
    if (!valid) continue;
    ASSERT_EQ(*back, c);
    ASSERT_EQ(position, bytes.size());
    for (size_t cut = 1; cut < bytes.size(); ++cut) ASSERT_EQ(find_invalid_utf8(bytes.substr(0, cut)), 0u);
  }
  for (const char* bad :
       {"\x80", "\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xF0\x8F\xBF\xBF", "\xF5\x80\x80\x80", "\xFF"})
    EXPECT_EQ(find_invalid_utf8(std::string("ab") + bad), 2u);
  EXPECT_EQ(find_invalid_utf8("na\xC3\xAFve"), std::string::npos);
}

TEST(SplitText, HoldsOutLastTenthOfEveryDocument) {
  const Text text = text_of_bytes("aaaaaaaaaAbbbbbbbbbbbbbbbbbbBB", "t", {{0, 10}, {10, 30}});
  const auto split = split_text(text);
  EXPECT_EQ(split.train, "aaaaaaaaabbbbbbbbbbbbbbbbbb");
  EXPECT_EQ(split.val, "ABB");
  // Five characters of two bytes: nine bytes end inside the last one, so it belongs to the training split.
  std::string umlauts;
  for (int i = 0; i < 15; ++i) umlauts += "\xC3\xA4";
  EXPECT_EQ(split_text(text_of_bytes(umlauts, "u")).train.size(), 28u);
  EXPECT_EQ(split_text(text_of_bytes(umlauts, "u")).val.size(), 2u);
  expect_error(Status::input, {"'tiny'", "5 bytes", "too short"}, [] { split_text(text_of_bytes("hello", "tiny")); });
}

TEST_F(TextTest, WritesFilesAtomically) {
  write_file(path("f"), "one", "two");
  EXPECT_EQ(read_file(path("f")), "onetwo");
  expect_error(Status::output, {"no/such/f"}, [&] { write_file(path("no/such/f"), "x"); });
  EXPECT_EQ(names_in(path("")), std::vector<std::string>{"f"}) << "a partial file was left";
}

TEST_F(TextTest, RunsProgramsWithTimeout) {
  EXPECT_EQ(run_program({"sh", "-c", "echo one; echo two >&2; exit 3"}, path(""), 10).status, 3);
  EXPECT_EQ(run_program({"sh", "-c", "echo one; echo two >&2"}, path(""), 10).last_line, "two");
  EXPECT_EQ(run_program({"no-such-program-here"}, path(""), 10).status, 127);
  EXPECT_EQ(run_program({"sh", "-c", "sleep 60; true"}, path(""), 1).status, 124);
  EXPECT_EQ(run_program({"sh", "-c", "test ! -t 0 && pwd"}, "/", 10).last_line, "/");
}

// --- token files, the order of training, and windows for validation ---

class TokenFileTest : public DataTest {
 protected:
  // A file of the tokens 0, 1, ..., n - 1.
  TokenFile counting(int64_t n) const {
    std::vector<int32_t> tokens(static_cast<size_t>(n));
    std::iota(tokens.begin(), tokens.end(), 0);
    TokenFile::write(path("t.tok"), tokens, n + 1);
    return TokenFile::open(path("t.tok"));
  }
};

TEST_F(TokenFileTest, RoundTripsBothTokenWidths) {
  for (const int64_t vocab : {int64_t{65536}, int64_t{70000}}) {
    const std::vector<int32_t> tokens{0, 65535, static_cast<int32_t>(vocab - 1)};
    TokenFile::write(path("t.tok"), tokens, vocab);
    const TokenFile f = TokenFile::open(path("t.tok"));
    EXPECT_EQ(std::filesystem::file_size(path("t.tok")), vocab == 65536 ? 70u : 76u);
    EXPECT_EQ(f.vocab_size(), vocab);
    EXPECT_EQ(read_tokens(f), tokens);
  }
  const std::vector<int32_t> bad{1, 7};
  expect_error(Status::usage, {"token 7", "position 1", "vocabulary of 7"},
               [&] { TokenFile::write(path("bad"), bad, 7); });
  expect_error(Status::output, {"no/t.tok"}, [&] { TokenFile::write(path("no/t.tok"), bad, 8); });
}

TEST_F(TokenFileTest, RejectsEveryTruncationAndCorruptedByte) {
  counting(20);
  const std::string good = read_file(path("t.tok"));
  const auto refused = [&](const std::string& bytes) {
    const std::string why = error_message([&] { TokenFile::open(file("bad.tok", bytes)); }, Status::input);
    return why.find("bad.tok") != std::string::npos;
  };
  EXPECT_FALSE(refused(good));
  for (size_t n = 0; n < good.size(); ++n) EXPECT_TRUE(refused(good.substr(0, n))) << n;
  EXPECT_TRUE(refused(good + "x"));
  const Philox random(2);
  for (uint64_t i = 0; i < 4000; ++i) {
    std::string bad = good;
    const size_t at = random.below(bad.size(), i);
    bad[at] = static_cast<char>(bad[at] ^ (1 + random.below(255, i, 1)));
    // The checksum does not cover the vocabulary (bytes 16 to 23); a different one may still include every token.
    const bool caught = refused(bad);
    EXPECT_TRUE(caught || (at >= 16 && at <= 23)) << at;
  }
  expect_error(Status::input, {"absent", "No such file"}, [&] { TokenFile::open(path("absent")); });
  expect_error(Status::input, {"directory"}, [&] { TokenFile::open(path("")); });
}

TEST_F(TokenFileTest, RejectsFilesModifiedWhileOpen) {
  const TokenFile f = counting(20000);
  std::vector<int32_t> out(20000);
  std::fstream(path("t.tok"), std::ios::in | std::ios::out | std::ios::binary)
      .seekp(64 + 2 * 15000)
      .write("\xff\xff", 2);
  f.copy(0, 15000, out.data());
  expect_error(Status::input, {"t.tok", "token 65535 at position 15000", "vocabulary of 20001"},
               [&] { f.copy(0, 20000, out.data()); });
  std::filesystem::resize_file(path("t.tok"), 64 + 2 * 9000 + 1);
  f.copy(0, 9000, out.data());
  expect_error(Status::input, {"t.tok", "truncated"}, [&] { f.copy(8000, 2000, out.data()); });
}

TEST_F(TokenFileTest, WindowOrderDependsOnlyOnSeedAndStep) {
  const TokenFile f = counting(1000);
  const Loader loader(f, 16, 12, 7);
  std::vector<int32_t> in(12 * 16), out(12 * 16), part_in(12 * 16), part_out(12 * 16);
  std::set<int32_t> starts;
  for (int64_t step = 0; step < 50; ++step) {
    loader.load(step, 0, 12, in.data(), out.data());
    for (int64_t first : {0, 4, 8}) {
      Loader(f, 16, 12, 7).load(step, first, 4, part_in.data() + first * 16, part_out.data() + first * 16);
      starts.insert(in[static_cast<size_t>(first) * 16]);
    }
    ASSERT_EQ(in, part_in);
    ASSERT_EQ(out, part_out);
    for (size_t i = 0; i < in.size(); ++i) ASSERT_EQ(out[i], in[i] + 1);
  }
  EXPECT_GT(starts.size(), 100u);
  EXPECT_EQ(loader.start(3, 5), static_cast<int64_t>(Philox::named(7, "data order").below(984, 3 * 12 + 5)));
  Loader(f, 16, 12, 8).load(0, 0, 12, part_in.data(), part_out.data());
  loader.load(0, 0, 12, in.data(), out.data());
  EXPECT_NE(in, part_in);
}

TEST_F(TokenFileTest, LoaderReachesLastTokenAndRejectsLongContexts) {
  const TokenFile f = counting(9);
  std::vector<int32_t> in(8), out(8);
  Loader(f, 8, 1, 1).load(5, 0, 1, in.data(), out.data());
  EXPECT_EQ(out.back(), 8);
  expect_error(Status::usage, {"`context`: a context of 9 tokens is too long", "9 tokens", "nearest valid value: 8"},
               [&] { Loader(f, 9, 1, 1); });
  expect_error(Status::usage, {"context 0"}, [&] { Loader(f, 0, 1, 1); });
  expect_error(Status::usage, {"batch 0"}, [&] { Loader(f, 4, 0, 1); });
  expect_error(Status::usage, {"batch of 2"}, [&] { Loader(f, 4, 2, 1).load(0, 1, 2, in.data(), out.data()); });
}

TEST_F(TokenFileTest, WindowsCoverEveryTargetOnce) {
  for (const int64_t n : {2, 8, 9, 10, 17, 30}) {
    const TokenFile f = counting(n);
    const Windows windows(f, 8);
    std::vector<int32_t> in(static_cast<size_t>(windows.count()) * 8), out(in.size()), seen;
    windows.load(0, windows.count(), in.data(), out.data());
    for (size_t i = 0; i < out.size(); ++i) {
      if (out[i] == Windows::kIgnored) continue;
      EXPECT_EQ(out[i], in[i] + 1);
      seen.push_back(out[i]);
    }
    std::vector<int32_t> expected(static_cast<size_t>(n - 1));
    std::iota(expected.begin(), expected.end(), 1);
    EXPECT_EQ(seen, expected);
    EXPECT_EQ(windows.targets(), n - 1);
    expect_error(Status::usage, {"rows"}, [&] { windows.load(windows.count(), 1, in.data(), out.data()); });
  }
  const TokenFile one = counting(1);
  expect_error(Status::usage, {"1 tokens"}, [&] { Windows(one, 8); });
}

// --- long texts: chunked encoding produces the same tokens in little memory ---

using LongText = DataTest;

constexpr size_t kChunk = size_t{8} << 10;

// The tokens of a text in chunks of random sizes, and the number of splits.
std::pair<std::vector<int32_t>, int> streamed(const Tokenizer& tokenizer, std::string_view text, bool ends,
                                              uint64_t seed) {
  std::vector<int32_t> out;
  int chunks = 0;
  TextEncoder encoder(
      tokenizer, "text",
      [&](std::span<const int32_t> more) {
        out.insert(out.end(), more.begin(), more.end());
        ++chunks;
      },
      ends, kChunk);
  const Philox random = Philox::named(seed, "pieces");
  for (uint64_t i = 0; !text.empty(); ++i) {
    const size_t size = std::min<size_t>(1 + random.below(3 * kChunk, i), text.size());
    encoder.add(text.substr(0, size));
    text.remove_prefix(size);
  }
  encoder.finish();
  return {out, chunks};
}

TEST_F(LongText, ChunkedEncodingMatchesFullEncoding) {
  const std::string text = test::mixed_text() + test::unseen_text() + test::mixed_text();
  std::vector<std::unique_ptr<Tokenizer>> all;
  all.push_back(make_tokenizer({"bytes"}, "t"));
  all.push_back(std::make_unique<CharTokenizer>(CharTokenizer::from_text(text, "t")));
  all.push_back(std::make_unique<BpeTokenizer>(train_bpe(test::mixed_text(), {.vocab_size = 500})));
  for (const char* const name : kTokenizers) all.push_back(Tokenizer::open_folder(tokenizer_fixture(name)));
  for (size_t t = 0; t < all.size(); ++t)
    for (const bool ends : {false, true}) {
      const auto [tokens, chunks] = streamed(*all[t], text, ends, 2 * t + (ends ? 1 : 0));
      EXPECT_EQ(tokens, all[t]->encode_with(text, {.add_ends = ends})) << t;
      EXPECT_GT(chunks, 10) << t;
    }
}

TEST_F(LongText, RejectsTextWithoutSplitPositions) {
  const auto tokenizer = Tokenizer::open_folder(tokenizer_fixture("llama3"));
  expect_error(Status::input, {"text", "no position in", "documents"},
               [&] { streamed(*tokenizer, std::string(20 * kChunk, 'x'), false, 1); });
}

TEST_F(LongText, ErrorsNameTheOffsetInTheText) {
  const CharTokenizer tokenizer = CharTokenizer::from_text("ab", "t");
  const std::string text = std::string(5 * kChunk, 'a') + "c";
  expect_error(Status::usage, {"'c'", "at byte " + std::to_string(5 * kChunk)},
               [&] { streamed(tokenizer, text, false, 2); });
}

// Training on chunks gives the same tokenizer, because no piece of GPT-2's pattern crosses a split.
TEST_F(LongText, ChunkedWordCountsMatchFullText) {
  const std::string one = test::mixed_text() + test::unseen_text();
  std::string text;
  while (text.size() < size_t{9} << 20) text += one;
  const TextWalk walk = [&](const SplitChunk& f) { f(text, false); };
  const auto learnt = make_tokenizer({.name = "bpe", .vocab_size = 600}, "t", walk);
  EXPECT_EQ(learnt->to_json(), train_bpe(text, {.vocab_size = 600, .min_count = 16}).to_json());
}

TEST_F(LongText, CountsDroppedRareWords) {
  WordCounts counts;
  const size_t words = WordCounts::kMax + 2;
  std::string text;
  for (size_t i = 0; i < words; ++i) text += " the x" + std::to_string(i);
  counts.add(text);
  EXPECT_EQ(counts.forgotten(), 1);
  EXPECT_LT(counts.all().size(), WordCounts::kMax);
  EXPECT_EQ(counts.all().at(" the"), static_cast<int64_t>(words));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

// The peak memory of the process since the last call, in MB.
int64_t peak() {
  std::ifstream status("/proc/self/status");
  int64_t kilobytes = 0;
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) kilobytes = std::stoll(line.substr(6));
  std::ofstream("/proc/self/clear_refs") << "5";
  return kilobytes / 1024;
}

TEST_F(LongText, ChunkedEncodingUsesLittleMemory) {
  std::string lines;
  for (int i = 0; i < 20'000; ++i) lines += "line " + std::to_string(i) + " of a long text, word by word\n";
  for (int i = 0; i < 50; ++i) {
    std::ofstream(path("text.txt"), std::ios::app) << lines;
    std::ofstream(path("text.jsonl"), std::ios::app)
        << "{\"text\": \"" << std::string(800'000, static_cast<char>('a' + i % 26)) << "\"}\n";
  }
  const auto megabytes = [&](const auto& f) {
    peak();
    const int64_t before = peak();
    f();
    return peak() - before;
  };
  const std::string text = path("text.txt");
  EXPECT_LT(megabytes([&] { dataset_for(text, {"char"}); }), 120);
  std::string said;
  const TokenizerChoice bpe{
      .name = "bpe", .vocab_size = 300, .progress = [&](const std::string& line) { said = line; }};
  EXPECT_LT(megabytes([&] { make_dataset_from({text}, bpe, path("bpe")); }), 120);
  EXPECT_EQ(said, text + ": 37 MiB read for its tokens");
  const std::vector<std::string> both{path("text.jsonl").string(), text};
  EXPECT_LT(megabytes([&] { make_dataset_from(both, {"bytes"}, path("both"), 10'000'000); }), 120);
  EXPECT_LT(megabytes([&] { evaluation_text(text, *make_tokenizer({"bytes"}, text), {.context = 8}); }), 240);
  EXPECT_EQ(Dataset::open(path("both")).train.size(), 7u);
}

#endif

}  // namespace
}  // namespace tessera
