// Token files, the order of training, and the windows of validation.
#include "data/token_file.h"

#include <numeric>
#include <set>

#include "tests/data/support.h"

namespace tessera {
namespace {

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

TEST_F(TokenFileTest, KeepsTokensOfBothWidths) {
  for (const int64_t vocab : {int64_t{65536}, int64_t{70000}}) {
    const std::vector<int32_t> tokens{0, 65535, static_cast<int32_t>(vocab - 1)};
    TokenFile::write(path("t.tok"), tokens, vocab);
    const TokenFile f = TokenFile::open(path("t.tok"));
    EXPECT_EQ(std::filesystem::file_size(path("t.tok")), vocab == 65536 ? 70u : 76u);
    EXPECT_EQ(f.size(), 3);
    EXPECT_EQ(f.vocab_size(), vocab);
    for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(f[i], tokens[static_cast<size_t>(i)]);
  }
  const std::vector<int32_t> bad{1, 7};
  expect_error(Status::usage, {"token 7", "position 1", "vocabulary of 7"},
               [&] { TokenFile::write(path("bad"), bad, 7); });
  expect_error(Status::output, {"no/t.tok"}, [&] { TokenFile::write(path("no/t.tok"), bad, 8); });
}

TEST_F(TokenFileTest, RefusesEveryTruncationAndEveryChangedByte) {
  counting(20);
  const std::string good = read_file(path("t.tok"));
  const auto refused = [&](const std::string& bytes) {
    try {
      TokenFile::open(file("bad.tok", bytes));
      return false;
    } catch (const InputError& e) {
      return std::string(e.what()).find("bad.tok") != std::string::npos;
    }
  };
  EXPECT_FALSE(refused(good));
  for (size_t n = 0; n < good.size(); ++n) EXPECT_TRUE(refused(good.substr(0, n))) << n;
  EXPECT_TRUE(refused(good + "x"));
  const Philox random(2);
  for (uint64_t i = 0; i < 4000; ++i) {
    std::string bad = good;
    const size_t at = random.below(bad.size(), i);
    bad[at] = static_cast<char>(bad[at] ^ (1 + random.below(255, i, 1)));
    // The vocabulary (bytes 16 to 23) is not under the checksum: another one may still hold every token.
    const bool caught = refused(bad);
    EXPECT_TRUE(caught || (at >= 16 && at <= 23)) << at;
  }
  expect_error(Status::input, {"absent", "No such file"}, [&] { TokenFile::open(path("absent")); });
  expect_error(Status::input, {"directory"}, [&] { TokenFile::open(path("")); });
}

TEST_F(TokenFileTest, AFileThatChangesWhileItIsOpenIsRefused) {
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
  expect_error(Status::input, {"t.tok", "cut short"}, [&] { f.copy(8000, 2000, out.data()); });
}

TEST_F(TokenFileTest, OrderIsAFunctionOfSeedAndStepUnderEverySlicing) {
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

TEST_F(TokenFileTest, LoaderReachesTheLastTokenAndRefusesALongContext) {
  const TokenFile f = counting(9);
  std::vector<int32_t> in(8), out(8);
  Loader(f, 8, 1, 1).load(5, 0, 1, in.data(), out.data());
  EXPECT_EQ(out.back(), 8);
  expect_error(Status::usage, {"context 9", "9 tokens", "at most 8"}, [&] { Loader(f, 9, 1, 1); });
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

}  // namespace
}  // namespace tessera
