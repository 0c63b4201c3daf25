// llm.c's token files, strictly validated, and datasets of them; datasets with byte-level BPE.
#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "data/examples.h"
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
  return read_tokens(TokenFile::from_llmc_bytes(std::as_bytes(std::span(bytes)), vocab, "t.bin"));
}

TEST(LlmcFile, ReadsBothTokenWidths) {
  EXPECT_EQ(parse(gpt2_file({0, 7, 50256, 65535}), 65536), (std::vector<int32_t>{0, 7, 50256, 65535}));
  EXPECT_EQ(parse(llmc<uint32_t>(20240801, 7, {0, 128000}), 128256), (std::vector<int32_t>{0, 128000}));
  EXPECT_EQ(parse(gpt2_file({}), 10), std::vector<int32_t>{});
}

TEST(LlmcFile, RejectsInvalidFiles) {
  const auto refuse = [](std::string bytes, size_t at, int32_t value, std::initializer_list<std::string> parts) {
    std::memcpy(bytes.data() + at, &value, at < bytes.size() ? 4 : 0);
    expect_error(Status::input, parts, [&] { parse(bytes, 100); });
  };
  const std::string good = gpt2_file({1, 2, 99});
  refuse(good, 0, 7, {"t.bin", "begins with 7", "20240520"});
  refuse(good, 4, 2, {"t.bin", "version 2", "expected 1"});
  refuse(good, 8, 4, {"4 tokens of 2 bytes", "got 6 bytes"});
  refuse(good, 8, -1, {"-1 tokens"});
  refuse(good, 12, 1, {"header value 3 is 1"});
  refuse(good, 1020, 1, {"header value 255"});
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

TEST_F(LlmcDataset, HoldsOutLastTenthOrValidationFile) {
  const Dataset alone = dataset_for(path("text_train.bin").string(), folder());
  EXPECT_EQ(alone.val.size(), (alone.train_tokens() + alone.val.size() + 9) / 10);
  EXPECT_EQ(alone.train_bytes + alone.val_bytes, static_cast<int64_t>(test::unseen_text().size()));
  file("text_val.bin", gpt2_file({1, 2, 3, 4}));
  const Dataset both = import_llmc(path("text_train.bin"), folder(), path("both"));
  EXPECT_EQ(both.val.size(), 4);
  EXPECT_EQ(both.train_tokens(), alone.train_tokens() + alone.val.size());
  EXPECT_EQ(dataset_for(path("text_train.bin").string(), folder()).val.size(), 4);  // not the cached one
}

TEST_F(LlmcDataset, RequiresTokenizer) {
  const std::string bin = path("text_train.bin").string();
  expect_error(Status::usage, {"`tokenizer`", "text_train.bin", "got none"}, [&] { dataset_for(bin, {}); });
  expect_error(Status::usage, {"`tokenizer`", "'bpe'"}, [&] { dataset_for(bin, {"bpe"}); });
  expect_error(Status::usage, {"`tokenizer` 'nowhere'"}, [&] { dataset_for(bin, {"nowhere"}); });
  file("text_val.bin", gpt2_file({500, 1}));
  expect_error(Status::input, {"text_val.bin", "token 500"}, [&] { dataset_for(bin, folder()); });
}

TEST_F(LlmcDataset, TokenizesTextWithTokenizerDirectory) {
  const std::string text = file("other.txt", test::unseen_text()).string();
  const Dataset other = dataset_for(text, folder());
  EXPECT_EQ(other.tokenizer->to_json(), Tokenizer::load(path("tokenizer/tokenizer.json"))->to_json());
  EXPECT_EQ(dataset_for(path("tokenizer").string(), folder()).tokenizer->vocab_size(), 500);
  const Dataset again =
      make_dataset(text_of_bytes(test::unseen_text(), "t"), {.name = "bpe", .vocab_size = 300}, path("another"));
  expect_error(Status::usage, {"`tokenizer`", "a different one (bpe)"},
               [&] { dataset_for(again.directory.string(), folder()); });
}

// --- datasets of several token files: of `tessera data`, or llm.c's in place ---

std::vector<uint16_t> numbered(uint16_t first, uint16_t count) {
  std::vector<uint16_t> out(count);
  std::iota(out.begin(), out.end(), first);
  return out;
}

class ShardsTest : public DataTest {
 protected:
  ShardsTest() {
    std::filesystem::create_directory(path("set"));
    const Dataset bytes = dataset_for(file("t.txt", "a text of its own, for a tokenizer").string(), {"bytes"});
    directory_ = bytes.directory.string();
  }
  void shard(const std::string& name, uint16_t first, uint16_t count) const {
    file("set/" + name, gpt2_file(numbered(first, count)));
  }
  TokenizerChoice tokenizer() const { return {.name = directory_}; }
  std::string pattern(const std::string& p) const { return path("set/" + p).string(); }

 private:
  std::string directory_;
};

TEST_F(ShardsTest, ReadsShardsInPlace) {
  shard("t_train_2.bin", 40, 30);
  shard("t_train_1.bin", 0, 40);
  shard("t_val_0.bin", 100, 20);
  for (const std::string& spec : {pattern("t_train_*.bin"), path("set").string(), pattern("*.bin")}) {
    const Dataset d = dataset_for(spec, tokenizer());
    ASSERT_EQ(d.train.size(), 2U) << spec;
    EXPECT_EQ(d.train[0].size(), 40);
    EXPECT_EQ(d.train[1][0], 40);
    EXPECT_EQ(d.val.size(), 20);
    EXPECT_EQ(d.val_bytes, 20);
    EXPECT_EQ(d.val[19], 119);
    EXPECT_EQ(d.train_tokens(), 70);
  }
  EXPECT_EQ(evaluation_text(path("set").string(), *Tokenizer::open_folder(tokenizer().name), {.context = 4}).bytes, 20);
}

TEST_F(ShardsTest, HoldsOutLastShardByDefault) {
  shard("a.bin", 0, 10);
  shard("b.bin", 10, 11);
  shard("c.bin", 20, 12);
  const Dataset d = dataset_for(path("set").string(), tokenizer());
  EXPECT_EQ(d.train.size(), 2U);
  EXPECT_EQ(d.val.size(), 12);
  EXPECT_NE(d.notes.at(0).find("c.bin"), std::string::npos);
}

TEST_F(ShardsTest, ChecksumsCoverEveryShard) {
  shard("a.bin", 0, 10);
  shard("b.bin", 10, 11);
  shard("val.bin", 0, 12);
  const auto sums = [&] { return dataset_for(path("set").string(), tokenizer()).checksums(); };
  const auto before = sums();
  EXPECT_EQ(sums(), before);
  shard("b.bin", 11, 11);
  EXPECT_NE(sums().at("data"), before.at("data"));
  EXPECT_EQ(sums().at("validation"), before.at("validation"));
}

TEST_F(ShardsTest, ErrorsNameTheFile) {
  const auto refuse = [&](const std::string& spec, Status status, std::initializer_list<std::string> parts) {
    expect_error(status, parts, [&] { dataset_for(spec, tokenizer()); });
  };
  refuse(pattern("*.bin"), Status::input, {"`data`", "*.bin", "no file matches"});
  refuse(path("set").string(), Status::input, {"not a dataset"});
  shard("a.bin", 0, 10);
  refuse(pattern("*.bin"), Status::input, {"1 file;", "one for validation"});
  shard("val.bin", 0, 1);
  refuse(pattern("*.bin"), Status::input, {"val.bin", "1 validation tokens"});
  shard("val.bin", 0, 10);
  expect_error(Status::usage, {"`tokenizer`", "got none"}, [&] { dataset_for(pattern("*.bin"), {}); });
  file("set/b.bin", "no tokens");
  refuse(pattern("*.bin"), Status::input, {"b.bin", "expected an llm.c token file", "`tessera data`"});
  file("set/b.bin", gpt2_file({1, 2, 300}));
  refuse(pattern("*.bin"), Status::input, {"b.bin", "token 300 at position 2", "vocabulary of 256"});
  file("set/b.bin", gpt2_file(numbered(0, 9)).substr(0, 1040));
  refuse(pattern("*.bin"), Status::input, {"b.bin", "9 tokens of 2 bytes"});
}

TEST_F(ShardsTest, MergesSeveralSources) {
  const std::string text(300, 'x'), more = file("more.txt", std::string(200, 'y')).string();
  std::string lines;
  for (int i = 0; i < 20; ++i) lines += "{\"text\": \"document\"}\n";
  const std::vector<std::string> sources{file("one.txt", text).string(), more, file("d.jsonl", lines).string()};
  const Dataset full = make_dataset_from(sources, {"bytes"}, path("whole")),
                cut = make_dataset_from(sources, {"bytes"}, path("cut"), 100);
  ASSERT_EQ(full.train.size(), 1U);
  EXPECT_EQ(full.train_tokens(), 270 + 180 + 18 * 10);
  EXPECT_EQ(full.val_tokens(), 30 + 20 + 2 * 10);
  ASSERT_EQ(cut.train.size(), 6U);
  EXPECT_EQ(cut.train_tokens(), full.train_tokens());
  EXPECT_EQ(cut.val.checksum(), full.val.checksum());
  int64_t at = 0;
  for (const TokenFile& f : cut.train)
    for (int64_t i = 0; i < f.size(); ++i, ++at) ASSERT_EQ(f[i], full.train[0][at]) << at;
  for (size_t i = 0; i + 1 < cut.train.size(); ++i) EXPECT_EQ(cut.train[i].size(), 100);
  // A tokenizer is trained on all sources.
  EXPECT_EQ(make_dataset_from(sources, {"char"}, path("char")).tokenizer->decode(std::vector<int32_t>{9, 10}), "xy");
  std::filesystem::remove(path("cut/train-00003.tok"));
  expect_error(Status::input, {"train-00003.tok"}, [&] { Dataset::open(path("cut")); });
  file("cut/dataset.json",
       R"({"format": "tessera dataset", "version": 1, "source": "", "val": {"tokens": 1, "bytes": 1},
      "train": {"tokens": 1, "bytes": 1, "files": ["../train.tok"]}})");
  expect_error(Status::input, {"dataset.json", "train.files", "'../train.tok'"}, [&] { Dataset::open(path("cut")); });
}

TEST(TrainingWindows, CoverEachFileOncePerEpoch) {
  std::vector<int32_t> first(23), second(9);
  std::iota(first.begin(), first.end(), 0);
  std::iota(second.begin(), second.end(), 100);
  const TokenFile a = TokenFile::from_tokens(first, 200, "a"), b = TokenFile::from_tokens(second, 200, "b");
  const TrainingWindows windows({a, b}, 4);
  ASSERT_EQ(windows.count(), 5 + 2);
  std::vector<int32_t> inputs(7 * 4), targets(7 * 4);
  windows.load(0, 7, inputs.data(), targets.data());
  for (int32_t i = 0; i < 28; ++i) {
    EXPECT_EQ(inputs[static_cast<size_t>(i)], i < 20 ? i : 80 + i);
    EXPECT_EQ(targets[static_cast<size_t>(i)], inputs[static_cast<size_t>(i)] + 1);
  }
  expect_error(Status::usage, {"rows 6 to 8", "outside the 7"},
               [&] { windows.load(6, 2, inputs.data(), targets.data()); });
  EXPECT_EQ(TrainingWindows({a, b}, 8).count(), 2 + 1);
  expect_error(Status::input, {"b: 9 tokens", "expected at least 10", "`context`"}, [&] {
    TrainingWindows({a, b}, 9);
  });
}

}  // namespace
}  // namespace tessera
