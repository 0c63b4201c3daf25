// Datasets: creation, caching, opening, errors; and the built-in texts.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "data/mixture.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

using DatasetTest = DataTest;

std::string prose() {
  std::string text;
  for (int i = 0; i < 40; ++i) text += "line " + std::to_string(i) + " of the na\xC3\xAFve text\n";
  return text;
}

TEST_F(DatasetTest, RoundTripsThroughDirectory) {
  const Text text = text_of_bytes(prose(), "prose");
  const Dataset d = make_dataset(text, {"char"}, path("deep/set/"));
  const auto split = split_text(text);
  EXPECT_EQ(d.tokenizer->decode(read_tokens(d.val)), split.val);
  EXPECT_EQ(d.source, "prose");
  EXPECT_EQ(d.val_bytes, static_cast<int64_t>(split.val.size()));
  EXPECT_EQ(d.train_bytes + d.val_bytes, text.size());
  EXPECT_LT(d.val.size(), d.val_bytes);  // the text has characters of two bytes
  const double per_byte = static_cast<double>(d.val.size()) / static_cast<double>(d.val_bytes);
  EXPECT_NEAR(d.bits_per_byte(std::log(2.0)), per_byte, 1e-12);
  expect_error(Status::output, {"set", "already exists"}, [&] { make_dataset(text, {"char"}, path("deep/set")); });
  EXPECT_EQ(dataset_for(path("deep/set").string(), {}).tokenizer->kind(), "char");
  expect_error(Status::usage, {"`tokenizer` bytes", "char"},
               [&] { dataset_for(path("deep/set").string(), {"bytes"}); });
}

TEST_F(DatasetTest, FailureLeavesNoFiles) {
  const auto refuse = [&](const std::string& text, const TokenizerChoice& choice, const std::string& folder,
                          Status status, std::initializer_list<std::string> parts) {
    expect_error(status, parts, [&] { make_dataset(text_of_bytes(text, "t"), choice, path(folder)); });
  };
  refuse("a\xFF" + prose(), {"char"}, "set", Status::input, {"not UTF-8", "offset 1"});
  refuse("hi", {"bytes"}, "deep/set", Status::input, {"too short"});
  EXPECT_TRUE(std::filesystem::is_empty(path("")));
  file("blocked", "");
  refuse(prose(), {"char"}, "blocked/set", Status::output, {"blocked"});
  refuse(prose(), {"char"}, std::string(300, 'x'), Status::output, {"cannot create the dataset", "too long"});
}

TEST_F(DatasetTest, CachesTextFilesByContent) {
  const std::string a = file("a.txt", prose()).string(), b = file("b.txt", prose()).string();
  const Dataset first = dataset_for(a, {}), second = dataset_for(b, {"char"}), bytes = dataset_for(a, {"bytes"});
  EXPECT_EQ(first.directory, second.directory);
  EXPECT_NE(first.directory, bytes.directory);
  EXPECT_EQ(second.source, b);
  EXPECT_EQ(bytes.tokenizer->vocab_size(), 256);
  std::filesystem::resize_file(first.directory / "val.tok", 70);  // a corrupt cache entry is rebuilt
  EXPECT_EQ(dataset_for(a, {}).val.size(), second.val.size());
  expect_error(Status::input, {"nowhere", "austen"}, [&] { dataset_for("nowhere", {}); });
  expect_error(Status::input, {"not a dataset"}, [&] { dataset_for(path("").string(), {}); });
}

TEST_F(DatasetTest, TokenizesDocumentsOfJsonlFiles) {
  std::string lines;
  for (int i = 0; i < 25; ++i) lines += "{\"text\": \"document " + std::to_string(i) + "\", \"id\": 3}\n\n";
  const std::filesystem::path jsonl = file("d.jsonl", lines);
  const Dataset bytes = make_dataset_from({jsonl.string()}, {"bytes"}, path("set"));
  EXPECT_EQ(bytes.tokenizer->decode(read_tokens(bytes.val)), "document 23\n\ndocument 24\n\n");
  EXPECT_TRUE(bytes.tokenizer->decode(read_tokens(bytes.train[0])).starts_with("document 0\n\ndocument 1\n\n"));
  EXPECT_EQ(bytes.val_bytes, 22) << "without the empty lines";
  const std::string folder = tokenizer_fixture("smollm");
  const Dataset ended = dataset_of_documents(jsonl, {.name = folder});
  EXPECT_EQ(ended.val[ended.val.size() - 1], ended.tokenizer->document_end());
  EXPECT_EQ(ended.val_bytes, 22);
  EXPECT_EQ(dataset_of_documents(jsonl, {.name = folder}).directory, ended.directory);
  expect_error(Status::input, {"bad.jsonl:2", "expected a document"}, [&] {
    make_dataset_from({file("bad.jsonl", "{\"text\": \"a\"}\n{\"prompt\": \"a\", \"completion\": \"b\"}\n").string()},
                      {"bytes"}, path("other"));
  });
  expect_error(Status::input, {"1 documents"}, [&] {
    make_dataset_from({file("one.jsonl", "{\"text\": \"a\"}\n").string()}, {"bytes"}, path("other"));
  });
  EXPECT_FALSE(std::filesystem::exists(path("other")));
}

TEST_F(DatasetTest, RejectsInconsistentDirectories) {
  const auto damage = [&](const std::string& name, const std::string& bytes, std::initializer_list<std::string> parts) {
    std::filesystem::remove_all(path("set"));
    make_dataset(text_of_bytes(prose(), "prose"), {"char"}, path("set"));
    std::ofstream(path("set") / name, std::ios::binary) << bytes;
    expect_error(Status::input, parts, [&] { Dataset::open(path("set")); });
  };
  const std::string start = R"({"format":"tessera dataset","version":1,"source":"s",)";
  damage("dataset.json", "{", {"dataset.json", "not valid JSON"});
  damage("dataset.json", "{}", {"dataset.json", "format"});
  damage("dataset.json", start + R"("train":{"bytes":-1}})", {"train.bytes"});
  damage("dataset.json", start + R"("train":{"bytes":9,"tokens":9},"val":{"bytes":9,"tokens":9}})",
         {"train.tokens is 9, but"});
  damage("tokenizer.json", R"({"format":"tessera tokenizer","version":1,"kind":"bytes"})",
         {"vocabularies differ", "256"});
  damage("val.tok", "TESS", {"val.tok"});
  make_dataset(text_of_bytes(prose(), "prose"), {"char"}, path("whole"));
  std::string huge = read_file(path("whole/dataset.json"));
  const size_t bytes = huge.find("\"bytes\": ", huge.find("\"val\"")) + 9;
  huge.replace(bytes, huge.find_first_of(",\n", bytes) - bytes, "4611686018427387904");
  damage("dataset.json", huge, {"dataset.json", "val.bytes is 4611686018427387904", "tokens of at most 2 bytes"});
}

TEST_F(DatasetTest, EnvironmentSelectsCacheDirectory) {
  EXPECT_EQ(cache_directory(), path("cache"));
  ::unsetenv("TESSERA_CACHE");
  ::setenv("XDG_CACHE_HOME", "/x", 1);
  EXPECT_EQ(cache_directory(), "/x/tessera");
  ::unsetenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  ASSERT_NE(home, nullptr);
  EXPECT_EQ(cache_directory(), std::filesystem::path(home) / ".cache" / "tessera");
}

// The checksums are those of the texts whose SHA-256 is in docs/data.md.
TEST_F(DatasetTest, AustenContainsSixNovels) {
  const std::optional<Text> text = builtin_text("austen");
  ASSERT_TRUE(text);
  EXPECT_EQ(checksum(text->bytes()), 0x9d8dc2e17e6618beu);
  const std::vector<std::string> openings{"EMMA\n",       "MANSFIELD PARK\n",      "NORTHANGER ABBEY\n",
                                          "Persuasion\n", "PRIDE AND PREJUDICE\n", "SENSE AND SENSIBILITY\n"};
  ASSERT_EQ(text->documents.size(), openings.size());
  for (size_t i = 0; i < openings.size(); ++i)
    EXPECT_EQ(text->bytes().substr(static_cast<size_t>(text->documents[i].begin), openings[i].size()), openings[i]);
  EXPECT_EQ(text->documents.back().end, text->size());
  EXPECT_EQ(dataset_for("austen", {}).source, "austen");
}

TEST_F(DatasetTest, TinyshakespeareIsOneDocument) {
  const std::optional<Text> text = builtin_text("tinyshakespeare");
  ASSERT_TRUE(text);
  EXPECT_EQ(checksum(text->bytes()), 0x6572a3fb9fde75d3u);
  ASSERT_EQ(text->documents.size(), 1u);
  EXPECT_EQ(text->documents[0].end, 1'115'394);
  EXPECT_FALSE(builtin_text("dickens"));
}

// --- mixtures: parsing of weights, ratios, and the order that matches them over every prefix ---

// Each dataset has its fraction of every prefix to within less than one sequence, and its sequences come in order.
void expect_ratios(const std::vector<int64_t>& ratios, int64_t until) {
  const MixtureOrder order(ratios);
  const int64_t sum = std::reduce(ratios.begin(), ratios.end(), int64_t{0});
  std::vector<int64_t> taken(ratios.size());
  for (int64_t n = 0; n < until; ++n) {
    const auto [dataset, nth] = order.at(n);
    ASSERT_EQ(nth, taken.at(dataset)++) << n;
    for (size_t k = 0; k < ratios.size(); ++k)
      ASSERT_LT(std::abs(taken[k] * sum - (n + 1) * ratios[k]), sum) << "dataset " << k << " of the first " << n + 1;
  }
}

TEST(MixtureOrder, EveryPrefixMatchesMixtureWeights) {
  expect_ratios({1}, 5);
  expect_ratios({7, 3}, 100);
  expect_ratios({1, 1, 1, 1}, 100);
  expect_ratios({1, 999}, 3000);
  for (uint64_t trial = 0; trial < 200; ++trial) {
    const Philox random = Philox::named(trial, "shares");
    std::vector<int64_t> ratios(1 + random.below(12, 0));
    for (size_t k = 0; k < ratios.size(); ++k)
      ratios[k] = 1 + static_cast<int64_t>(random.below(trial % 2 == 0 ? 9 : 200, k + 1));
    expect_ratios(ratios, 2 * std::reduce(ratios.begin(), ratios.end(), int64_t{0}) + 3);
  }
}

TEST(MixtureOrder, RandomAccessMatchesSequentialAccess) {
  const MixtureOrder order({700'000, 299'999, 1});
  const auto far = order.at(3'000'000'000'000 + 17), near = order.at(17);
  EXPECT_EQ(far.dataset, near.dataset);
  EXPECT_EQ(far.nth - near.nth, near.dataset == 0 ? 2'100'000'000'000 : 899'997'000'000);
  for (const std::vector<int64_t>& bad :
       {std::vector<int64_t>{}, {1, 0}, {1, -1}, {1'000'000, 1}, std::vector<int64_t>(257, 1)})
    expect_error(Status::usage, {"[mixture]", "weights"}, [&] { MixtureOrder{bad}; });
}

TEST(MixtureOrder, ConvertsWeightsToIntegerRatios) {
  using Ratios = std::vector<int64_t>;
  const auto of = [](std::vector<double> weights) { return integer_ratios(weights); };
  EXPECT_EQ(of({0.7, 0.3}), (Ratios{7, 3}));
  EXPECT_EQ(of({2, 4, 6}), (Ratios{1, 2, 3}));
  EXPECT_EQ(of({0.333333, 0.333333, 0.333333}), (Ratios{1, 1, 1}));
  EXPECT_EQ(of({1e12, 5e11}), (Ratios{2, 1}));
  EXPECT_EQ(of({1e-3, 3e-3}), (Ratios{1, 3}));
  EXPECT_EQ(of({123456789, 987654321}), (Ratios{111111, 888889}));
  EXPECT_EQ(of({1e300, 1e300, 1e-300}), (Ratios{499999, 500000, 1}));
  const double max_weight = std::numeric_limits<double>::max(), min_weight = std::numeric_limits<double>::denorm_min();
  for (uint64_t trial = 0; trial < 200; ++trial) {
    const Philox random = Philox::named(trial, "weights");
    std::vector<double> weights(2 + random.below(255, 0));
    for (size_t k = 0; k < weights.size(); ++k)
      weights[k] = k % 17 == 3 ? max_weight : k % 11 == 2 ? min_weight : std::exp(20 * random.normal(k + 1));
    const Ratios ratios = integer_ratios(weights);
    EXPECT_LE(std::reduce(ratios.begin(), ratios.end(), int64_t{0}), 1'000'000);
    EXPECT_GE(*std::ranges::min_element(ratios), 1);
  }
}

TEST(MixtureWeights, ParsesNamesAndWeights) {
  const auto as_text = [](const std::vector<Weighted>& all) {
    std::string out;
    for (const Weighted& w : all) out += w.name + ":" + std::to_string(w.weight).substr(0, 4) + " ";
    return out;
  };
  EXPECT_EQ(as_text(parse_weights("a=0.7,b/c.txt=0.3", "`data`")), "a:0.70 b/c.txt:0.30 ");
  EXPECT_EQ(as_text(parse_weights("a=b=1,c=2e0", "`data`")), "a=b:1.00 c:2.00 ");
  EXPECT_EQ(as_text(parse_weights_file(R"({"x": 1, "y": 0.25})", "m.json")), "x:1.00 y:0.25 ");
  EXPECT_EQ(as_text(parse_weights_file("x = 3 # more\ny = 0.25\n", "m.toml")), "x:3.00 y:0.25 ");
}

TEST(MixtureWeights, RejectsInvalidWeights) {
  const auto refuse = [](const std::string& text, std::initializer_list<std::string> parts) {
    expect_error(Status::usage, parts, [&] { parse_weights(text, "`data`"); });
  };
  refuse("a=1", {"`data`", "1 weighted dataset", "2 to 256"});
  refuse("a=1,b", {"'b' has no weight", "NAME=WEIGHT"});
  refuse("a=1,", {"'' has no weight"});
  refuse("a=1,=2", {"a dataset has no name"});
  for (const char* bad : {"0", "-1", "nan", "inf", "1e999", "x", "", "0x1", "1 "})
    refuse("a=1,b=" + std::string(bad), {"weight of 'b'", "positive number"});
  refuse("a=1,b=2,a=3", {"'a' is a duplicate"});
  refuse("a=1,b=2,./a=3", {"'./a' is a duplicate"});
  std::string many = "a=1";
  for (int i = 0; i < 256; ++i) many += ",b" + std::to_string(i) + "=1";
  refuse(many, {"257 weighted datasets", "2 to 256"});
  const auto refuse_file = [](const std::string& text, Status status, std::initializer_list<std::string> parts) {
    expect_error(status, parts, [&] { parse_weights_file(text, status == Status::usage ? "m.toml" : "m.json"); });
  };
  refuse_file("[]", Status::input, {"m.json", "an object that maps names to weights"});
  refuse_file(R"({"a": 1, "a": 2})", Status::input, {"m.json", "duplicate key"});
  refuse_file(R"({"a": 1, "b": "2"})", Status::input, {"m.json", "weight of 'b'"});
  refuse_file("a = 1\nb\n", Status::usage, {"m.toml:2"});
}

class MixtureTest : public DataTest {
 protected:
  Dataset text(const std::string& name, const std::string& bytes, const char* tokenizer = "bytes") const {
    return dataset_for(file(name, bytes).string(), {tokenizer});
  }
  // Mixes a.txt and b.txt with these weights.
  static Dataset mixture(Dataset a, double ratio_of_a, Dataset b, double ratio_of_b) {
    std::vector<Dataset> all;
    all.push_back(std::move(a));
    all.push_back(std::move(b));
    return mixed({{"a.txt", ratio_of_a}, {"b.txt", ratio_of_b}}, std::move(all));
  }
};

TEST_F(MixtureTest, ResolvesPathsRelativeToMixtureFile) {
  std::filesystem::create_directory(path("sets"));
  file("sets/a.txt", "text");
  const auto found = mixture_in(file("sets/m.json", R"({"a.txt": 1, "austen": 2})").string());
  ASSERT_TRUE(found);
  EXPECT_EQ((*found)[0].spec, path("sets/a.txt").string());
  EXPECT_EQ((*found)[1].spec, "austen");
  EXPECT_FALSE(mixture_in("austen"));
  EXPECT_FALSE(mixture_in(file("b=1", "a text of that name").string()));
}

TEST_F(MixtureTest, ChecksumsDifferBetweenMixtures) {
  const auto sums = [&](double a, double b, const std::string& second) {
    return mixture(text("a.txt", std::string(50, 'a')), a, text("b.txt", second), b).checksums();
  };
  const std::string b(70, 'b');
  EXPECT_EQ(sums(1, 2, b), sums(2, 4, b));
  EXPECT_NE(sums(1, 2, b).at("data"), sums(2, 1, b).at("data"));
  EXPECT_EQ(sums(1, 2, b).at("validation"), sums(2, 1, b).at("validation"));
  EXPECT_NE(sums(1, 2, b), sums(1, 2, b + "cc"));
}

TEST_F(MixtureTest, RejectsDifferentTokenizers) {
  const auto mix = [&] {
    mixture(text("a.txt", std::string(30, 'a'), "char"), 1, text("b.txt", std::string(29, 'b') + "cb", "char"), 1);
  };
  expect_error(Status::usage, {"`data`", "'b.txt'", "different tokenizer (char, 2 tokens)", "'a.txt' (char, 1 tokens)"},
               mix);
}

// Each component is checked against the rows of the model's embedding: 'a' is token 97, 'b' is 98.
TEST_F(MixtureTest, ChecksTokensOfEveryDataset) {
  for (const bool first : {false, true}) {
    const Dataset b = text("b.txt", std::string(90, 'b')), a = text("a.txt", std::string(50, 'a'));
    const Dataset d = first ? mixture(b, 1, a, 1) : mixture(a, 1, b, 1);
    EXPECT_NO_THROW(d.check_tokens(99));
    expect_error(Status::input, {"b.txt", "98"}, [&] { d.check_tokens(98); });
  }
}

// Each token is one byte of text in any mixture; a mean loss of log(2) is one bit.
TEST_F(MixtureTest, BitsPerByteAreIndependentOfMixtureWeights) {
  const Dataset d = mixture(text("a.txt", std::string(50, 'a')), 1, text("b.txt", std::string(90, 'b')), 3);
  EXPECT_NEAR(d.bits_per_byte(std::log(2.0)), 1, 1e-12);
  EXPECT_EQ(d.train_tokens(), 45 + 81);
  EXPECT_EQ(d.val_tokens(), 5 + 9);
  expect_error(Status::usage, {"got a mixture"}, [&] { (void)d.validation(4); });
}

}  // namespace
}  // namespace tessera
