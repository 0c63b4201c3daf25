// Text files, their refusals, UTF-8 and the split.
#include "data/text.h"

#include <sys/stat.h>
#include <unistd.h>

#include "data/process.h"
#include "data/utf8.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

using TextTest = DataTest;

TEST_F(TextTest, KeepsLineEndsAndDropsTheByteOrderMark) {
  EXPECT_EQ(load_text_file(file("a", "one\r\ntwo\n")).bytes(), "one\r\ntwo\n");
  const Text text = load_text_file(file("b", "\xEF\xBB\xBFword"));
  EXPECT_EQ(text.bytes(), "word");
  ASSERT_EQ(text.documents.size(), 1u);
  EXPECT_EQ(text.documents[0].end, 4);
  const std::string line(10'000'000, 'x');
  EXPECT_EQ(load_text_file(file("long", line)).bytes().size(), line.size());
}

TEST_F(TextTest, RefusesWhatIsNoText) {
  const auto load = [&](const std::string& name) { return [this, name] { load_text_file(path(name)); }; };
  expect_error(Status::input, {"absent", "No such file"}, load("absent"));
  file("empty", "");
  expect_error(Status::input, {"empty is empty"}, load("empty"));
  file("mark", "\xEF\xBB\xBF");
  expect_error(Status::input, {"byte order mark"}, load("mark"));
  file("binary", std::string("abc\0def", 7));
  expect_error(Status::input, {"binary", "NUL byte at offset 3"}, load("binary"));
  const std::string raw("\x01\x00\x02\x00", 4);
  file("train.bin", raw);
  expect_error(Status::input, {"train.bin", "tokens without a header, as nanoGPT's"}, load("train.bin"));
  file("mega.bin", raw), file("mega.idx", std::string("MMIDIDX\0\0", 9));
  expect_error(Status::input, {"mega.bin", "Megatron-LM"}, load("mega.bin"));
  const std::pair<std::string, const char*> foreign[] = {
      {std::string("\xFF\xFE"
                   "a\0",
                   4),
       "UTF-16"},
      {std::string("\xFE\xFF\0a", 4), "UTF-16"},
      {std::string("MMIDIDX\0\0", 9), "Megatron-LM"},
      {"PAR1...", "Parquet"},
      {"BZh91AY&SY...", "bzip2"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "pointer of git-lfs"}};
  for (const auto& [bytes, is] : foreign) {
    file("foreign", bytes);
    expect_error(Status::input, {"foreign", is}, load("foreign"));
  }
  expect_error(Status::input, {"foreign", "pointer of git-lfs"}, [&] { MappedFile mapped(path("foreign")); });
  expect_error(Status::input, {"foreign", "pointer of git-lfs"}, [&] { read_file(path("foreign")); });
  std::filesystem::create_directory(path("folder"));
  expect_error(Status::input, {"folder is a directory"}, load("folder"));
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  expect_error(Status::input, {"fifo", "not a regular file"}, load("fifo"));
  file("secret", "text");
  ASSERT_EQ(::chmod(path("secret").c_str(), 0), 0);
  if (::geteuid() != 0) expect_error(Status::input, {"secret", "Permission denied"}, load("secret"));
}

TEST(Utf8, EveryCodePointComesBackAndNothingElseIsTaken) {
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

TEST(SplitText, HoldsOutTheLastTenthOfEveryDocument) {
  const Text text = text_of_bytes("aaaaaaaaaAbbbbbbbbbbbbbbbbbbBB", "t", {{0, 10}, {10, 30}});
  const auto split = parts_of(text);
  EXPECT_EQ(split.train, "aaaaaaaaabbbbbbbbbbbbbbbbbb");
  EXPECT_EQ(split.val, "ABB");
  // Five characters of two bytes: nine bytes are cut inside the last one, which goes to the training part whole.
  std::string umlauts;
  for (int i = 0; i < 15; ++i) umlauts += "\xC3\xA4";
  EXPECT_EQ(parts_of(text_of_bytes(umlauts, "u")).train.size(), 28u);
  EXPECT_EQ(parts_of(text_of_bytes(umlauts, "u")).val.size(), 2u);
  expect_error(Status::input, {"'tiny'", "5 bytes", "too short"}, [] { parts_of(text_of_bytes("hello", "tiny")); });
}

TEST_F(TextTest, WholeFiles) {
  write_file(path("f"), "one", "two");
  EXPECT_EQ(read_file(path("f")), "onetwo");
  expect_error(Status::output, {"no/such/f"}, [&] { write_file(path("no/such/f"), "x"); });
  int entries = 0;
  for ([[maybe_unused]] const auto& e : std::filesystem::directory_iterator(path(""))) ++entries;
  EXPECT_EQ(entries, 1) << "something half-written stayed";
}

TEST_F(TextTest, RunsProgramsAndGivesUpOnSlowOnes) {
  EXPECT_EQ(run_program({"sh", "-c", "echo one; echo two >&2; exit 3"}, path(""), 10).status, 3);
  EXPECT_EQ(run_program({"sh", "-c", "echo one; echo two >&2"}, path(""), 10).last_line, "two");
  EXPECT_EQ(run_program({"no-such-program-here"}, path(""), 10).status, 127);
  EXPECT_EQ(run_program({"sh", "-c", "sleep 60; true"}, path(""), 1).status, 124);
  EXPECT_EQ(run_program({"sh", "-c", "test ! -t 0 && pwd"}, "/", 10).last_line, "/");
}

}  // namespace
}  // namespace tessera
