// Rows of JSON files as other programs write them, and the files of examples that a name denotes.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "data/examples.h"
#include "data/json_rows.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Rows of a file as "LINE ROW", without white space.
std::vector<std::string> rows_in(std::string_view bytes) {
  std::vector<std::string> out;
  for_each_line(bytes, "f", [&](std::string_view line, int64_t number) {
    std::string text(line);
    std::erase_if(text, [](char c) { return c == ' ' || c == '\n' || c == '\r'; });
    out.push_back(fmt::format("{} {}", number, text));
  });
  return out;
}

TEST(Rows, SplitsEveryJsonLayoutIntoRows) {
  const std::pair<const char*, std::vector<std::string>> cases[] = {
      {"{\n  \"a\": [\n1,\n2\n]\n  , \"b\": \"}\\\"{\"\n}\r\n{\n\"a\": 3}",
       {R"(1 {"a":[1,2],"b":"}\"{"})", R"(8 {"a":3})"}},
      {"{\"a\": 1}{\"a\": 2},\n{\"a\": 3},\n", {R"(1 {"a":1})", R"(1 {"a":2})", R"(2 {"a":3})"}},
      {"[\"x, ]\",\n \"y\", [1, [2]], 3]", {R"(1 "x,]")", R"(2 "y")", "2 [1,[2]]", "2 3"}},
      {"\"x\"\n\n\"y\"", {R"(1 "x")", R"(3 "y")"}},
      // A truncated row ends with its line.
      {"{\"a\": \"b\n{\"a\": 1\n{\"a\": 2}\n}{\n", {R"(1 {"a":"b)", R"(2 {"a":1)", R"(3 {"a":2})", "4 }{"}}};
  for (const auto& [bytes, expected] : cases) EXPECT_EQ(rows_in(bytes), expected) << bytes;
  EXPECT_EQ(error_message([] { rows_in("[{\"a\": 1},"); }, Status::input),
            "f:1: the list of rows is not closed after this line");
  EXPECT_EQ(error_message([] { rows_in("[1]\n2"); }, Status::input), "f:2: unexpected content after the list of rows");
}

// The output of to_dict() of `datasets` and to_json() of pandas in each orientation, and nested lists.
TEST(Rows, SplitsTablesStoredAsOneObject) {
  const std::vector<std::string> rows{R"(1 {"prompt":"a","completion":"c"})", R"(2 {"prompt":"b","completion":"d"})"};
  for (const char* text :
       {R"({"prompt": ["a", "b"], "completion": ["c", "d"]})",
        R"({"prompt": {"0": "a", "1": "b"}, "completion": {"0": "c", "1": "d"}})",
        R"({"x": {"prompt": "a", "completion": "c"}, "y": {"prompt": "b", "completion": "d"}})",
        R"({"0": {"prompt": "a", "completion": "c"}, "1": {"prompt": "b", "completion": "d"}})",
        R"({"columns": ["prompt", "completion"], "index": [0, 1], "data": [["a", "c"], ["b", "d"]]})",
        R"({"version": "1", "data": [{"prompt": "a", "completion": "c"}, {"prompt": "b", "completion": "d"}]})"})
    EXPECT_EQ(rows_in(text), rows) << text;
  EXPECT_EQ(rows_in(R"({"input_ids": [[1, 2], [3]]})"),
            (std::vector<std::string>{R"(1 {"input_ids":[1,2]})", R"(2 {"input_ids":[3]})"}));
  for (const char* row :
       {R"({"input_ids":[1,2],"labels":[1,2]})", R"({"messages":[{"role":"user"}],"tools":[{"a":1}]})",
        R"({"prompt":"a","completion":"b","sources":[{"url":"c"}]})", R"({"text":"a"})"})
    EXPECT_EQ(rows_in(row), std::vector<std::string>{"1 " + std::string(row)});
  EXPECT_EQ(error_message([] { rows_in(R"({"train": [{"text": "a"}], "test": [{"text": "b"}]})"); }, Status::input),
            "f: several lists of rows (train, test); expected one; 'jq -c \".train[]\" FILE' extracts one");
}

TEST(Rows, RejectsObjectsWithTooManyKeys) {
  std::string text = "{\"text\": {";
  for (int i = 0; i < 30'000; ++i) text += fmt::format("{}\"{}\": \"a\"", i > 0 ? "," : "", i);
  EXPECT_TRUE(
      error_message([&] { rows_in(text + "}}"); }, Status::input).starts_with("f: one object of more than 20000 keys"));
  const std::string deep = "{\"a\":" + std::string(100'000, '[') + std::string(100'000, ']') + "}";
  EXPECT_EQ(rows_in(deep), std::vector<std::string>{"1 " + deep});
}

using RowFiles = DataTest;

TEST_F(RowFiles, SeveralFilesFormOneDataset) {
  const std::string one = "{\"prompt\": \"ab\", \"completion\": \"cd\"}\n";
  file("a1.jsonl", one + one), file("a2.jsonl", one + one + one), file("b.jsonl", one), file("b.txt", "text");
  const auto examples = [&](const std::string& spec) {
    const Dataset d = load_examples(spec, {"bytes"}, {.context = 8});
    return std::pair(d.train_examples->examples(), d.val_examples->examples());
  };
  EXPECT_EQ(examples(path("a?.jsonl")), std::pair(int64_t{4}, int64_t{1}));
  EXPECT_EQ(examples(path("a*.jsonl").string() + "," + path("b.jsonl").string()), std::pair(int64_t{5}, int64_t{1}));
  EXPECT_FALSE(names_examples(path("b.txt")));
  expect_error(Status::input, {"b.txt: expected examples, as in "}, [&] { example_files(path("b.*")); });
  // A directory as `datasets` reads it, with files added by Windows and macOS.
  fs::create_directories(path("d/train")), fs::create_directories(path("d/__MACOSX"));
  file("d/train/x.jsonl", one + one), file("d/train/._x.jsonl", "\1"), file("d/__MACOSX/x.jsonl", "\1");
  file("d/desktop.ini", "[x]"), file("d/test.json", one);
  EXPECT_EQ(examples(path("d")), std::pair(int64_t{2}, int64_t{1}));
  file("d/data-validation.jsonl", one + one + one);
  EXPECT_EQ(examples(path("d")), std::pair(int64_t{2}, int64_t{3}));
  EXPECT_EQ(example_files(path("d")).unused, std::vector<fs::path>{path("d/test.json")});
  fs::create_directory(path("arrow"));
  file("arrow/data-00000-of-00001.arrow", "\xff\xff\xff\xff");
  expect_error(Status::input, {"expected rows of JSON", "python3 -m tessera.rows"}, [&] { examples(path("arrow")); });
  // A key that some rows have.
  const ExampleOptions options{.names = {parse_key_names("prompt=q")}, .context = 8};
  EXPECT_EQ(error_message([&] { load_examples(file("f.jsonl", one + one), {"bytes"}, options); }, Status::input),
            path("f.jsonl").string() + ":1: the key 'q', named in `map`, is missing");
  EXPECT_EQ(error_message(
                [&] {
                  load_examples(file("f.jsonl", one + one), {"bytes"},
                                {.names = {parse_key_names("system=q")}, .context = 8});
                },
                Status::input),
            path("f.jsonl").string() + ": no row has the key 'q', named in `map`");
}

TEST_F(RowFiles, ErrorsNameUnsupportedTableFormats) {
  for (const char* bytes : {"id,prompt,completion\n1,a,b\n", "\"text\"\n\"a\"\n", "messages\n"})
    expect_error(Status::input, {"CSV with the columns of examples", "python3 -m tessera.rows"},
                 [&] { dataset_for(file("t.csv", bytes), {"bytes"}); });
  const Dataset text = dataset_for(file("t.tsv", "question\tanswer\n1\t2\nprompt, completion\n"), {"bytes"});
  EXPECT_TRUE(text.notes.at(0).find("t.tsv: TSV, read as plain text; ") != std::string::npos) << text.notes.at(0);
  expect_error(Status::input, {"YAML with"}, [&] { check_table(file("t.yaml", "- prompt: a\n  completion: b\n")); });
  EXPECT_EQ(check_table(file("t.txt", "prompt,completion\n")), "");
}

}  // namespace
}  // namespace tessera
