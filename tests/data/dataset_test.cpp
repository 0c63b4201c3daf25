// Datasets: made, cached, opened, refused; and the texts known by name.
#include "data/dataset.h"

#include "tests/data/support.h"

namespace tessera {
namespace {

using DatasetTest = DataTest;

std::string prose() {
  std::string text;
  for (int i = 0; i < 40; ++i) text += "line " + std::to_string(i) + " of the na\xC3\xAFve text\n";
  return text;
}

TEST_F(DatasetTest, IsMadeAndOpened) {
  const Text text = text_of_bytes(prose(), "prose");
  const Dataset d = make_dataset(text, {"char"}, path("deep/set/"));
  const auto split = parts_of(text);
  std::vector<int32_t> val(static_cast<size_t>(d.val.size()));
  d.val.copy(0, d.val.size(), val.data());
  EXPECT_EQ(d.tokenizer->decode(val), split.val);
  EXPECT_EQ(d.source, "prose");
  EXPECT_EQ(d.val_bytes, static_cast<int64_t>(split.val.size()));
  EXPECT_EQ(d.train_bytes + d.val_bytes, text.size());
  EXPECT_LT(d.val.size(), d.val_bytes);  // the text has characters of two bytes
  const double per_byte = static_cast<double>(d.val.size()) / static_cast<double>(d.val_bytes);
  EXPECT_NEAR(d.bits_per_byte(std::log(2.0)), per_byte, 1e-12);
  expect_error(Status::output, {"set", "exists already"}, [&] { make_dataset(text, {"char"}, path("deep/set")); });
  EXPECT_EQ(dataset_for(path("deep/set").string(), {}).tokenizer->kind(), "char");
  expect_error(Status::usage, {"`tokenizer` bytes", "char"},
               [&] { dataset_for(path("deep/set").string(), {"bytes"}); });
}

TEST_F(DatasetTest, AFailureLeavesNothing) {
  expect_error(Status::input, {"not UTF-8", "offset 1"},
               [&] { make_dataset(text_of_bytes("a\xFF" + prose(), "t"), {"char"}, path("set")); });
  EXPECT_TRUE(std::filesystem::is_empty(path("")));
  file("blocked", "");
  expect_error(Status::output, {"blocked"},
               [&] { make_dataset(text_of_bytes(prose(), "t"), {"char"}, path("blocked/set")); });
  expect_error(Status::output, {"cannot make the dataset", "too long"},
               [&] { make_dataset(text_of_bytes(prose(), "t"), {"char"}, path(std::string(300, 'x'))); });
}

TEST_F(DatasetTest, TextFilesAreCachedByContent) {
  const std::string a = file("a.txt", prose()).string(), b = file("b.txt", prose()).string();
  const Dataset first = dataset_for(a, {}), second = dataset_for(b, {"char"}), bytes = dataset_for(a, {"bytes"});
  EXPECT_EQ(first.directory, second.directory);
  EXPECT_NE(first.directory, bytes.directory);
  EXPECT_EQ(second.source, b);
  EXPECT_EQ(bytes.tokenizer->vocab_size(), 256);
  std::filesystem::resize_file(first.directory / "val.tok", 70);  // a damaged cache is made again
  EXPECT_EQ(dataset_for(a, {}).val.size(), second.val.size());
  expect_error(Status::input, {"nowhere", "austen"}, [&] { dataset_for("nowhere", {}); });
  expect_error(Status::input, {"no dataset"}, [&] { dataset_for(path("").string(), {}); });
}

TEST_F(DatasetTest, DocumentsOfAJsonlFile) {
  std::string lines;
  for (int i = 0; i < 25; ++i) lines += "{\"text\": \"document " + std::to_string(i) + "\", \"id\": 3}\n\n";
  const auto text_of = [](const Dataset& d, const TokenFile& split) {
    std::vector<int32_t> tokens(static_cast<size_t>(split.size()));
    split.copy(0, split.size(), tokens.data());
    return d.tokenizer->decode(tokens);
  };
  const std::filesystem::path jsonl = file("d.jsonl", lines);
  const Dataset bytes = make_dataset_of({jsonl.string()}, {"bytes"}, path("set"));
  EXPECT_EQ(text_of(bytes, bytes.val), "document 23\n\ndocument 24\n\n");
  EXPECT_TRUE(text_of(bytes, bytes.train[0]).starts_with("document 0\n\ndocument 1\n\n"));
  EXPECT_EQ(bytes.val_bytes, bytes.val.size());
  const std::string folder = TESSERA_SOURCE_DIR "/tests/data/fixtures/tokenizers/smollm";
  const Dataset ended = dataset_of_documents(jsonl, {.name = folder});
  EXPECT_EQ(ended.val[ended.val.size() - 1], ended.tokenizer->document_end());
  EXPECT_EQ(ended.val_bytes, 22);
  EXPECT_EQ(dataset_of_documents(jsonl, {.name = folder}).directory, ended.directory);
  expect_error(Status::input, {"bad.jsonl:2", "expected a document"}, [&] {
    make_dataset_of({file("bad.jsonl", "{\"text\": \"a\"}\n{\"prompt\": \"a\", \"completion\": \"b\"}\n").string()},
                    {"bytes"}, path("other"));
  });
  expect_error(Status::input, {"1 documents"},
               [&] { make_dataset_of({file("one.jsonl", "{\"text\": \"a\"}\n").string()}, {"bytes"}, path("other")); });
  EXPECT_FALSE(std::filesystem::exists(path("other")));
}

TEST_F(DatasetTest, RefusesDirectoriesThatDoNotFitTogether) {
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
         {"train.tokens is 9 there"});
  damage("tokenizer.json", R"({"format":"tessera tokenizer","version":1,"kind":"bytes"})",
         {"vocabularies differ", "256"});
  damage("val.tok", "TESS", {"val.tok"});
  make_dataset(text_of_bytes(prose(), "prose"), {"char"}, path("whole"));
  std::string huge = read_file(path("whole/dataset.json"));
  const size_t bytes = huge.find("\"bytes\": ", huge.find("\"val\"")) + 9;
  huge.replace(bytes, huge.find_first_of(",\n", bytes) - bytes, "4611686018427387904");
  damage("dataset.json", huge, {"dataset.json", "val.bytes is 4611686018427387904", "tokens of at most 2 bytes"});
}

TEST_F(DatasetTest, CacheDirectoryFollowsTheEnvironment) {
  EXPECT_EQ(cache_directory(), path("cache"));
  ::unsetenv("TESSERA_CACHE");
  ::setenv("XDG_CACHE_HOME", "/x", 1);
  EXPECT_EQ(cache_directory(), "/x/tessera");
  ::unsetenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  ASSERT_NE(home, nullptr);
  EXPECT_EQ(cache_directory(), std::filesystem::path(home) / ".cache" / "tessera");
}

// The checksums are those of the texts whose SHA-256 docs/data.md gives.
TEST_F(DatasetTest, AustenIsTheSixNovels) {
  const std::optional<Text> text = known_text("austen");
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
  const std::optional<Text> text = known_text("tinyshakespeare");
  ASSERT_TRUE(text);
  EXPECT_EQ(checksum(text->bytes()), 0x6572a3fb9fde75d3u);
  ASSERT_EQ(text->documents.size(), 1u);
  EXPECT_EQ(text->documents[0].end, 1'115'394);
  EXPECT_FALSE(known_text("dickens"));
}

}  // namespace
}  // namespace tessera
