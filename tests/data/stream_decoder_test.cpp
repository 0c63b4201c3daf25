// Text that comes token by token: whole characters only, and nothing lost.
#include <gtest/gtest.h>

#include "data/tokenizer/described.h"
#include "tests/data/bpe_texts.h"

namespace tessera {
namespace {

// The decoder's text for bytes that come one by one; each time it must be UTF-8.
std::string streamed(std::string_view bytes) {
  const ByteTokenizer tokenizer;
  StreamDecoder decoder(tokenizer);
  std::string out;
  const auto add = [&](const std::string& part) {
    EXPECT_EQ(find_invalid_utf8(part), std::string::npos);
    out += part;
  };
  for (const int32_t token : tokenizer.encode(bytes)) add(decoder.add(token));
  add(decoder.end());
  EXPECT_EQ(decoder.end(), "");
  return out;
}

TEST(StreamDecoder, GivesWholeCharactersOfBytesThatComeOneByOne) {
  const std::string text = test::mixed_text().substr(0, 6000);
  const std::string whole = text.substr(0, std::min(find_invalid_utf8(text), text.size()));
  ASSERT_GT(whole.size(), 5000U);
  EXPECT_EQ(streamed(whole), whole);
}

TEST(StreamDecoder, WaitsForACharacterAndNoLonger) {
  const ByteTokenizer tokenizer;
  StreamDecoder decoder(tokenizer);
  EXPECT_EQ(decoder.add('a'), "a");
  EXPECT_EQ(decoder.add(0xF0), "");
  EXPECT_EQ(decoder.add(0x9F), "");
  EXPECT_EQ(decoder.add(0x98), "");
  EXPECT_EQ(decoder.add(0x80), "\xF0\x9F\x98\x80");
  EXPECT_EQ(decoder.add(0xE2), "");
  EXPECT_EQ(decoder.add('b'),
            "\xEF\xBF\xBD"
            "b");
  EXPECT_EQ(decoder.add(0xC3), "");
  EXPECT_EQ(decoder.end(), "\xEF\xBF\xBD");
}

// Python's bytes.decode("utf-8", "replace") makes the same text of these bytes.
TEST(StreamDecoder, ShowsWhatIsNoCharacterAsPythonDoes) {
  const std::string bad = "\xEF\xBF\xBD";
  const std::pair<std::string, std::string> cases[] = {
      {"a\xFF\xFE b", "a" + bad + bad + " b"},
      {"\xE2\x82 c \xF0\x9F\x98 \xC3", bad + " c " + bad + " " + bad},
      {"\xED\xA0\x80", bad + bad + bad},
      {"\xF4\x90\x80\x80", bad + bad + bad + bad},
      {"\xC0\xAF\xE0\x9F\xBF", bad + bad + bad + bad + bad},
      {"\xF0\x8F\xBF\xBF", bad + bad + bad + bad},
      {"\xE0\xA0", bad},
      {"\xF4\x8F\xBF"
       "x",
       bad + "x"},
  };
  for (const auto& [bytes, text] : cases) {
    EXPECT_EQ(streamed(bytes), text);
    EXPECT_EQ(replace_broken(bytes), text);
  }
}

TEST(StreamDecoder, ShowsPeopleTheBytesThatAreNoCharacter) {
  const ByteTokenizer tokenizer;
  StreamDecoder decoder(tokenizer, StreamDecoder::Broken::escaped);
  std::string out;
  for (const int32_t token : tokenizer.encode("a\xFF \xE2\x82 \xC3\xA9\xF0\x9F")) out += decoder.add(token);
  EXPECT_EQ(out + decoder.end(), "a\\xff \\xe2\\x82 \xC3\xA9\\xf0\\x9f");
}

}  // namespace
}  // namespace tessera
