// llm.c's token files, read strictly, and datasets made of them; datasets with byte-level BPE.
#include <cstring>

#include "data/dataset.h"
#include "data/tokenizer/described.h"
#include "tests/data/bpe_texts.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

template <class T>
std::string llmc(int32_t magic, int32_t version, const std::vector<T>& tokens) {
  std::string out(1024 + tokens.size() * sizeof(T), '\0');
  const std::array<int32_t, 3> header{magic, version, static_cast<int32_t>(tokens.size())};
  std::memcpy(out.data(), header.data(), sizeof(header));
  if (!tokens.empty()) std::memcpy(out.data() + 1024, tokens.data(), tokens.size() * sizeof(T));
  return out;
}
std::string gpt2_file(const std::vector<uint16_t>& tokens) { return llmc(20240520, 1, tokens); }

std::vector<int32_t> parse(const std::string& bytes, int64_t vocab) {
  const TokenFile file = TokenFile::of_llmc_bytes(std::as_bytes(std::span(bytes)), vocab, "t.bin");
  std::vector<int32_t> out(static_cast<size_t>(file.size()));
  file.copy(0, file.size(), out.data());
  return out;
}

TEST(LlmcFile, IsReadInBothWidths) {
  EXPECT_EQ(parse(gpt2_file({0, 7, 50256, 65535}), 65536), (std::vector<int32_t>{0, 7, 50256, 65535}));
  EXPECT_EQ(parse(llmc<uint32_t>(20240801, 7, {0, 128000}), 128256), (std::vector<int32_t>{0, 128000}));
  EXPECT_EQ(parse(gpt2_file({}), 10), std::vector<int32_t>{});
}

TEST(LlmcFile, IsCheckedStrictly) {
  const auto refuse = [](std::string bytes, size_t at, int32_t value, std::initializer_list<std::string> parts) {
    std::memcpy(bytes.data() + at, &value, at < bytes.size() ? 4 : 0);
    expect_error(Status::input, parts, [&] { parse(bytes, 100); });
  };
  const std::string good = gpt2_file({1, 2, 99});
  refuse(good, 0, 7, {"t.bin", "begins with 7", "20240520"});
  refuse(good, 4, 2, {"t.bin", "version 2", "expected 1"});
  refuse(good, 8, 4, {"4 tokens of 2 bytes", "6 bytes are there"});
  refuse(good, 8, -1, {"-1 tokens"});
  refuse(good, 12, 1, {"number 3 of the header is 1"});
  refuse(good, 1020, 1, {"number 255"});
  refuse(gpt2_file({1, 100, 2, 3}), 4, 1, {"token 100 at position 1", "vocabulary of 100"});
  refuse(good.substr(0, 1029), 4, 1, {"3 tokens of 2 bytes"});
  refuse(good.substr(0, 1000), 4, 1, {"1000 bytes", "1024"});
  refuse(llmc<uint32_t>(20240801, 7, {1, 0x80000000U}), 4, 7, {"token 2147483648 at position 1"});
}

class LlmcDataset : public DataTest {
 protected:
  LlmcDataset() {
    const Dataset made =
        make_dataset(text_of_bytes(test::mixed_text(), "mixed"), {.name = "bpe", .vocab_size = 500}, path("tokenizer"));
    EXPECT_EQ(made.tokenizer->vocab_size(), 500);
    std::vector<uint16_t> tokens;
    for (const int32_t t : made.tokenizer->encode(test::unseen_text())) tokens.push_back(static_cast<uint16_t>(t));
    file("text_train.bin", gpt2_file(tokens));
  }
  TokenizerChoice folder() const { return {.name = path("tokenizer").string()}; }
};

TEST_F(LlmcDataset, HoldsOutTheLastTenthOrItsSibling) {
  const Dataset alone = dataset_for(path("text_train.bin").string(), folder());
  EXPECT_EQ(alone.val.size(), (alone.train_tokens() + alone.val.size() + 9) / 10);
  EXPECT_EQ(alone.train_bytes + alone.val_bytes, static_cast<int64_t>(test::unseen_text().size()));
  file("text_val.bin", gpt2_file({1, 2, 3, 4}));
  const Dataset both = import_llmc(path("text_train.bin"), folder(), path("both"));
  EXPECT_EQ(both.val.size(), 4);
  EXPECT_EQ(both.train_tokens(), alone.train_tokens() + alone.val.size());
  EXPECT_EQ(dataset_for(path("text_train.bin").string(), folder()).val.size(), 4);  // not what the cache had
}

TEST_F(LlmcDataset, NeedsTheTokenizer) {
  const std::string bin = path("text_train.bin").string();
  expect_error(Status::usage, {"`tokenizer`", "text_train.bin", "found none"}, [&] { dataset_for(bin, {}); });
  expect_error(Status::usage, {"`tokenizer`", "'bpe'"}, [&] { dataset_for(bin, {"bpe"}); });
  expect_error(Status::usage, {"`tokenizer` 'nowhere'"}, [&] { dataset_for(bin, {"nowhere"}); });
  file("text_val.bin", gpt2_file({500, 1}));
  expect_error(Status::input, {"text_val.bin", "token 500"}, [&] { dataset_for(bin, folder()); });
}

TEST_F(LlmcDataset, ATextTakesATokenizerFromAFolder) {
  const std::string text = file("other.txt", test::unseen_text()).string();
  const Dataset other = dataset_for(text, folder());
  EXPECT_EQ(other.tokenizer->to_json(), Tokenizer::load(path("tokenizer/tokenizer.json"))->to_json());
  EXPECT_EQ(dataset_for(path("tokenizer").string(), folder()).tokenizer->vocab_size(), 500);
  const Dataset again =
      make_dataset(text_of_bytes(test::unseen_text(), "t"), {.name = "bpe", .vocab_size = 300}, path("another"));
  expect_error(Status::usage, {"`tokenizer`", "another one (bpe)"},
               [&] { dataset_for(again.directory.string(), folder()); });
}

}  // namespace
}  // namespace tessera
