// Tokenizers, their JSON, and the strict JSON reader.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "data/tokenizer/described.h"
#include "tests/data/bpe_texts.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

TEST(CharTokenizer, AssignsIdsInCodePointOrder) {
  const CharTokenizer t = CharTokenizer::from_text("ba\xC3\xA9\xE2\x82\xAC\na", "t");
  EXPECT_EQ(t.vocab_size(), 5);
  EXPECT_EQ(t.encode("\nab\xC3\xA9\xE2\x82\xAC"), (std::vector<int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(t.decode(t.encode("b\xE2\x82\xAC")), "b\xE2\x82\xAC");
  EXPECT_EQ(Tokenizer::from_json(t.to_json(), "t")->encode("\xE2\x82\xAC"), (std::vector<int32_t>{4}));
}

TEST(CharTokenizer, ErrorsNameTheCharacter) {
  const CharTokenizer t = CharTokenizer::from_text("ab", "t");
  expect_error(Status::usage, {"'\xC3\xA9'", "U+00E9", "byte 2", "2 of the tokenizer"},
               [&] { t.encode("ab\xC3\xA9"); });
  expect_error(Status::usage, {"U+000A", "byte 1"}, [&] { t.encode("a\n"); });
  expect_error(Status::usage, {"not UTF-8", "offset 1"}, [&] { t.encode("a\xFF"); });
  const std::vector<int32_t> outside{0, 2};
  expect_error(Status::usage, {"token 2", "vocabulary of 2"}, [&] { t.decode(outside); });
  expect_error(Status::input, {"novel.txt", "not UTF-8", "0xe9", "offset 3"},
               [] { CharTokenizer::from_text("caf\xE9!", "novel.txt"); });
  expect_error(Status::input, {"empty"}, [] { CharTokenizer::from_text("", "t"); });
}

TEST(ByteTokenizer, RoundTripsEveryByte) {
  std::string all;
  for (int b = 0; b < 256; ++b) all += static_cast<char>(b);
  const std::unique_ptr<Tokenizer> t = make_tokenizer({"bytes"}, "t");
  EXPECT_EQ(t->decode(t->encode(all)), all);
  EXPECT_EQ(t->encode("\xFF"), (std::vector<int32_t>{255}));
  EXPECT_EQ(Tokenizer::from_json(t->to_json(), "t")->kind(), "bytes");
  expect_error(Status::usage, {"`tokenizer` 'words'"}, [] { make_tokenizer({"words"}, "t"); });
}

TEST(TokenizerJson, RejectsInvalidFiles) {
  const auto refuse = [](const std::string& json, const std::string& part) {
    expect_error(Status::input, {"tok.json", part}, [&] { Tokenizer::from_json(json, "tok.json"); });
  };
  const std::string start = R"({"format":"tessera tokenizer","version":1,"kind":)";
  refuse("[]", "'format'");
  refuse(R"({"format":"other"})", "'format'");
  refuse(R"({"format":"tessera tokenizer","version":2,"kind":"bytes"})", "'version'");
  refuse(start + R"("words"})", "'kind'");
  refuse(start + R"("bytes","more":1})", "4 keys");
  refuse(start + R"("char"})", "'characters'");
  refuse(start + R"("char","characters":[]})", "empty");
  refuse(start + R"("char","characters":[98,97]})", "must be in ascending order; 97 follows 98");
  refuse(start + R"("char","characters":[55296]})", "55296");
  refuse(start + R"("char","characters":[-1]})", "-1");
  refuse(start + R"("char","characters":["a"]})", "code point");
}

TEST(Json, RejectsLossyInput) {
  EXPECT_EQ(parse_json(R"({"a":[1,{"b":2}],"c":{"b":18446744073709551615}})", "f")["c"]["b"], 18446744073709551615u);
  const auto refuse = [](const std::string& json, const std::string& part) {
    expect_error(Status::input, {"f.json", part}, [&] { parse_json(json, "f.json"); });
  };
  refuse(std::string("{}\0 more", 8), "byte 2: NUL byte");
  refuse(R"({"a":1,"a":2})", "duplicate key 'a'");
  refuse(R"({"a":18446744073709551616})", "18446744073709551616 does not fit in 64 bits");
  refuse(R"({"a":-9223372036854775809})", "does not fit in 64 bits");
  refuse(R"({"a":NaN})", "byte 6");
  refuse(R"({"a":1e999})", "not valid JSON");
  refuse(R"({"a":1} x)", "not valid JSON");
  refuse("", "not valid JSON");
  refuse("{\"a\":\n\n", "not valid JSON");
  refuse(std::string(100'000, '['), "nested deeper");
}

TEST(Json, IgnoresUnusedKeysInForeignFiles) {
  const std::string deep = std::string(200, '[') + std::string(200, ']');
  const nlohmann::json json =
      parse_json(R"({"a":[1e400,7,-1e999],"b":{"x":1,"x":{"x":2,"y":3},"z":4},"c":123456789012345678901,"d":)" + deep +
                     R"(,"e":"1e400","f":0.5e-400,"g":1e30})",
                 "f.json", JsonFile::others);
  for (const nlohmann::json* one : {&json["a"][0], &json["a"][2], &json["b"]["x"], &json["c"]})
    EXPECT_TRUE(one->is_discarded() && !natural(*one)) << json;
  EXPECT_EQ(json["a"][1], 7);
  EXPECT_EQ(json["b"]["z"], 4);
  EXPECT_EQ(json["e"], "1e400");
  EXPECT_EQ(json["f"], 0.0);
  EXPECT_EQ(json["g"], 1e30);
  EXPECT_EQ(json.size(), 7U);
  for (const char* broken : {"", "{\"a\":1e400", "{\"a\":1e400x}", "{1e400:2}", "[1e400 1]"})
    expect_error(Status::input, {"f.json", "not valid JSON"}, [&] { parse_json(broken, "f.json", JsonFile::others); });
}

TEST(Json, ExtractsTheMembersOfOneObject) {
  using Json = nlohmann::json;
  const auto find_aside = [](const Json& all, const std::string& text) {
    JsonAside aside{"model", "vocab", {}};
    EXPECT_EQ(parse_json(text, "f.json", JsonFile::others, &aside), all) << text;
    return aside.members;
  };
  const Json all{{"vocab", {{"x", 1}}}, {"other", {{"vocab", {{"y", 2}}}}}, {"model", {{"vocab", {}}, {"more", 3}}}};
  Json empty = all;
  empty["model"]["vocab"] = Json::object();
  const std::vector<std::pair<std::string, Json>> members{{"b", 1}, {"a", {{"vocab", {{"c", {0}}}}}}, {"b", 2.5}};
  EXPECT_EQ(find_aside(empty, R"({"vocab":{"x":1},"other":{"vocab":{"y":2}},
      "model":{"vocab":{"b":1,"a":{"vocab":{"c":[0]}},"b":2.5},"more":3}})"),
            members);
  for (const char* const other :
       {R"({"model":{"vocab":[{"a":1}]}})", R"({"model":[{"vocab":{"a":1}}]})", R"([{"vocab":{"a":1}}])"})
    EXPECT_TRUE(find_aside(Json::parse(other), other).empty()) << other;
}

TEST(Json, FormatsValuesAndFindsKeys) {
  EXPECT_EQ(shown(nlohmann::json{{"a", "\xC3\xA9\xFF"}}), R"({"a":"\u00e9\ufffd"})");
  EXPECT_EQ(shown(nlohmann::json::value_t::discarded),
            "a value that contains NaN, a duplicate key, an integer beyond 64 bits or more than 64 levels of nesting");
  EXPECT_EQ(shown(nlohmann::json("abcdef"), 4), "\"abc...");
  EXPECT_EQ(value_at(nlohmann::json{{"a", 1}}, "a"), 1);
  for (const nlohmann::json& other : {nlohmann::json(2), nlohmann::json{{"b", 1}}})
    EXPECT_TRUE(value_at(other, "a").is_null());
}

// --- decoding of token streams: only complete characters, and no loss ---

// The decoder's text for bytes that arrive one by one; it must be UTF-8 each time.
std::string streamed(std::string_view bytes, StreamDecoder::Broken broken = StreamDecoder::Broken::replaced) {
  const ByteTokenizer tokenizer;
  StreamDecoder decoder(tokenizer, broken);
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

TEST(StreamDecoder, EmitsOnlyCompleteCharacters) {
  const std::string text = test::mixed_text().substr(0, 6000);
  const std::string full = text.substr(0, std::min(find_invalid_utf8(text), text.size()));
  ASSERT_GT(full.size(), 5000U);
  EXPECT_EQ(streamed(full), full);
}

TEST(StreamDecoder, EmitsCharactersWithoutDelay) {
  const ByteTokenizer tokenizer;
  StreamDecoder decoder(tokenizer);
  const std::pair<int32_t, const char*> steps[] = {
      {'a', "a"}, {0xF0, ""},       {0x9F, ""}, {0x98, ""}, {0x80, "\xF0\x9F\x98\x80"},
      {0xE2, ""}, {'b', "\uFFFDb"}, {0xC3, ""}};
  for (const auto& [byte, text] : steps) EXPECT_EQ(decoder.add(byte), text) << byte;
  EXPECT_EQ(decoder.end(), "\xEF\xBF\xBD");
}

// Python's bytes.decode("utf-8", "replace") produces the same text.
TEST(StreamDecoder, ReplacesInvalidBytesLikePython) {
  const std::string bad = "\xEF\xBF\xBD";
  const std::pair<std::string, std::string> cases[] = {
      {"a\xFF\xFE b", "a" + bad + bad + " b"},
      {"\xE2\x82 c \xF0\x9F\x98 \xC3", bad + " c " + bad + " " + bad},
      {"\xED\xA0\x80", bad + bad + bad},
      {"\xF4\x90\x80\x80", bad + bad + bad + bad},
      {"\xC0\xAF\xE0\x9F\xBF", bad + bad + bad + bad + bad},
      {"\xF0\x8F\xBF\xBF", bad + bad + bad + bad},
      {"\xE0\xA0", bad},
      {"\xF4\x8F\277x", bad + "x"},
  };
  for (const auto& [bytes, text] : cases) {
    EXPECT_EQ(streamed(bytes), text);
    EXPECT_EQ(replace_broken(bytes), text);
  }
}

TEST(StreamDecoder, EscapesInvalidBytes) {
  EXPECT_EQ(streamed("a\xFF \xE2\x82 \xC3\xA9\xF0\x9F", StreamDecoder::Broken::escaped),
            "a\\xff \\xe2\\x82 \xC3\xA9\\xf0\\x9f");
}

}  // namespace
}  // namespace tessera
