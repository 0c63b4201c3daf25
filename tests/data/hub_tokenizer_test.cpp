// Hugging Face tokenizers: the same tokens as the library `tokenizers`, and rejected files.
#include <regex.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/utf8.h"
#include "data/dataset.h"
#include "data/tokenizer/described.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

Json to_json(const std::filesystem::path& file) { return Json::parse(read_file(file)); }

std::string unhex(const std::string& digits) {
  std::string bytes;
  for (size_t i = 0; i < digits.size(); i += 2) bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  return bytes;
}

class HubTokenizerTest : public DataTest {
 protected:
  // A fixture's directory with a modified tokenizer.json.
  std::filesystem::path changed(const std::string& name, const std::function<void(Json&)>& change) const {
    Json json = to_json(tokenizer_fixture(name) / "tokenizer.json");
    change(json);
    return directory_with(json.dump());
  }
  // A fixture's directory with another configuration.
  std::filesystem::path configured(const std::string& name, const Json& config) const {
    const std::filesystem::path folder = changed(name, [](Json&) {});
    file("made/tokenizer_config.json", config.dump());
    return folder;
  }
  std::filesystem::path directory_with(const std::string& tokenizer) const {
    const std::filesystem::path folder = emptied("made");
    file("made/tokenizer.json", tokenizer);
    return folder;
  }
  void expect_refused(const std::filesystem::path& folder, std::initializer_list<std::string> parts) const {
    expect_error(Status::input, parts, [&] { Tokenizer::open_folder(folder); });
  }
};

TEST_F(HubTokenizerTest, TokensMatchHfTokenizers) {
  for (const char* const name : kTokenizers) {
    const auto tokenizer = Tokenizer::open_folder(tokenizer_fixture(name));
    for (const Json& e : to_json(tokenizer_fixture(name) / "expected.json")) {
      SCOPED_TRACE(std::string(name) + " " + e.dump().substr(0, 300));
      const std::string text = unhex(e["bytes"]);
      const auto ids = e["ids"].get<std::vector<int32_t>>();
      EXPECT_EQ(tokenizer->encode(text), ids);
      EXPECT_EQ(replace_broken(tokenizer->decode(ids)), e.value("text", replace_broken(text)));
      if (e.contains("special")) {
        EXPECT_EQ(tokenizer->encode_with(text, {.special_in_text = true, .add_ends = true}),
                  e["special"].get<std::vector<int32_t>>());
      }
    }
  }
}

// Special tokens in a text are text unless requested otherwise.
TEST_F(HubTokenizerTest, RoundTripsTextWithSpecialTokens) {
  for (const char* const name : kTokenizers) {
    SCOPED_TRACE(name);
    const auto tokenizer = Tokenizer::open_folder(tokenizer_fixture(name));
    EXPECT_EQ(tokenizer->kind(), "hub");
    EXPECT_EQ(tokenizer->token_bytes(tokenizer->bos().value()), "<s>");
    EXPECT_EQ(tokenizer->token_bytes(tokenizer->document_end().value()), "</s>");
    EXPECT_EQ(tokenizer->chat_template(), std::string("{{ messages }} of ") + name);
    const auto again = Tokenizer::from_json(tokenizer->to_json(), "kept");
    EXPECT_EQ(again->to_json(), tokenizer->to_json());
    EXPECT_EQ(again->files().at("tokenizer.json"), read_file(tokenizer_fixture(name) / "tokenizer.json"));
    EXPECT_EQ(again->encode("She'd <tool> 12"), tokenizer->encode("She'd <tool> 12"));
    EXPECT_EQ(again->bos(), tokenizer->bos());
    const int32_t end = tokenizer->special("<|end|>").value();
    EXPECT_EQ(tokenizer->special("<|none|>"), std::nullopt);
    EXPECT_EQ(tokenizer->token_bytes(end), "<|end|>");
    const auto plain = tokenizer->encode_with("a<|end|>b</s>", {}),
               special = tokenizer->encode_with("a<|end|>b</s>", {.special_in_text = true});
    for (const int32_t token : {end, tokenizer->document_end().value()}) {
      EXPECT_EQ(std::ranges::count(plain, token), 0) << token;
      EXPECT_EQ(std::ranges::count(special, token), 1) << token;
    }
  }
}

TEST_F(HubTokenizerTest, ContinuedTextGetsNoPrefixSpace) {
  for (const char* const name : {"roberta", "llama2", "mistral"}) {
    const auto tokenizer = Tokenizer::open_folder(tokenizer_fixture(name));
    const auto to_string = [&](const std::vector<int32_t>& tokens) {
      std::string text;
      for (const int32_t t : tokens) text += tokenizer->token_bytes(t);
      return text;
    };
    EXPECT_EQ(to_string(tokenizer->encode_with("single", {.begins = false})), "single") << name;
    EXPECT_EQ(to_string(tokenizer->encode("single")), " single") << name;
  }
}

// Rules that trained files do not exercise, because their merges reach every token and digits were never merged.
TEST_F(HubTokenizerTest, VocabularyWordsAndDigitsPrecedeMerges) {
  for (const bool ignore : {true, false}) {
    const auto folder = changed("llama3", [&](Json& json) {
      json["model"]["merges"] = Json::array();
      json["model"]["ignore_merges"] = ignore;
    });
    EXPECT_EQ(Tokenizer::open_folder(folder)->encode(" a").size(), ignore ? 1U : 2U);
  }
  for (const bool individual : {true, false}) {
    const auto folder = changed("smollm", [&](Json& json) {
      json["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = individual;
      Json& model = json["model"];
      Json& last = model["merges"].back();
      const std::string made = last[0].get<std::string>() + last[1].get<std::string>();
      model["vocab"]["12"] = model["vocab"][made];
      model["vocab"].erase(made);
      last = {"1", "2"};
    });
    EXPECT_EQ(Tokenizer::open_folder(folder)->encode("12").size(), individual ? 2U : 1U);
  }
}

TEST_F(HubTokenizerTest, IsStoredWithDataset) {
  std::string text;
  for (int i = 0; i < 40; ++i) text += "She'd said <|end|> caf\xC3\xA9 " + std::to_string(i) + "\n";
  const std::string name = tokenizer_fixture("qwen").string();
  const Dataset made = make_dataset(text_of_bytes(text, "text"), {.name = name}, path("dataset"));
  EXPECT_EQ(made.tokenizer->kind(), "hub");
  EXPECT_EQ(made.tokenizer->decode(read_tokens(made.train[0])), text.substr(0, static_cast<size_t>(made.train_bytes)));
  const auto lent = Tokenizer::open_folder(path("dataset"));
  EXPECT_EQ(lent->to_json(), Tokenizer::open_folder(name)->to_json());
  EXPECT_TRUE(fits({.name = name}, *made.tokenizer));
  EXPECT_FALSE(fits({.name = tokenizer_fixture("gpt2").string()}, *made.tokenizer));
  EXPECT_NE(cache_name({.name = name}), cache_name({.name = tokenizer_fixture("gpt2").string()}));
}

// Two directories whose tokenizers produce the same tokens share cached tokens, and nothing else.
TEST_F(HubTokenizerTest, ReadsSettingsFromDirectoryInsteadOfCache) {
  file("text.txt", std::string(500, 'a'));
  for (const int32_t end : {7, 8}) {
    const TokenizerChoice choice{.name = changed("smollm", [](Json&) {}).string()};
    file("made/generation_config.json", Json{{"eos_token_id", end}}.dump());
    const Dataset d = dataset_for(path("text.txt").string(), choice);
    EXPECT_EQ(generation_ends(*d.tokenizer), std::vector<int32_t>{end});
  }
}

// The bytes 1 and 2 are spelled "\u0101\u0102"; a token written as "\u0001\u0002" is a different one, which no merge
// produces.
TEST_F(HubTokenizerTest, MergesResolveTokensByByteSpelling) {
  for (const bool as_pairs : {false, true}) {
    int32_t spelled = 0;
    const auto tokenizer = Tokenizer::open_folder(changed("gpt2", [&](Json& json) {
      Json &vocab = json["model"]["vocab"], &merges = json["model"]["merges"];
      spelled = static_cast<int32_t>(vocab.size() + json["added_tokens"].size());
      for (const Json& token : json["added_tokens"]) spelled -= vocab.contains(token["content"].get<std::string>());
      vocab["\u0101\u0102"] = spelled;
      vocab["\u0001\u0002"] = spelled + 1;
      merges.push_back(as_pairs ? Json{"\u0101", "\u0102"} : Json("\u0101 \u0102"));
    }));
    EXPECT_EQ(tokenizer->encode("\x01\x02"), std::vector<int32_t>{spelled});
    EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{spelled, spelled + 1}), "\x01\x02\x01\x02");
  }
}

TEST_F(HubTokenizerTest, AcceptsOneTokenVocabulary) {
  const auto tokenizer = Tokenizer::open_folder(directory_with(R"({"model": {"vocab": {"a": 0}, "merges": []}})"));
  EXPECT_EQ(tokenizer->encode("aa"), (std::vector<int32_t>{0, 0}));
  expect_error(Status::usage, {"no token for 'b'"}, [&] { tokenizer->encode("b"); });
}

TEST_F(HubTokenizerTest, ErrorsNameUnknownComponents) {
  const auto set = [](const char* pointer, const Json& value) {
    return [=](Json& json) { json[Json::json_pointer(pointer)] = value; };
  };
  const auto splits = [](const char* regex) {
    return Json{{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}, {"invert", false}};
  };
  for (const auto& [regex, why] : {std::pair{"(a", "unmatched parenthesis"},
                                   {"a)|(b", "unmatched close parenthesis"},
                                   {"\\p{Foo}", "invalid character property name {Foo}"},
                                   {"(*NOTHING)", "undefined callout name"},
                                   {"*", "target of repeat operator is not specified"}})
    expect_refused(changed("llama3", set("/pre_tokenizer", splits(regex))),
                   {"made/tokenizer.json", "the pattern", why});
  expect_refused(changed("gpt2", set("/pre_tokenizer", {{"type", "UnicodeScripts"}})), {"pre_tokenizer", "UnicodeS"});
  expect_refused(changed("gpt2", set("/normalizer", {{"type", "Precompiled"}})), {"normalizer", "Precompiled"});
  expect_refused(changed("gpt2", set("/pre_tokenizer", {{"type", "Punctuation"}, {"behavior", "Some"}})), {"behavior"});
  expect_refused(changed("gpt2", set("/decoder", {{"type", "WordPiece"}})), {"decoder", "WordPiece"});
  expect_refused(changed("llama2", set("/decoder", {{"type", "ByteLevel"}})), {"decoder", "ByteLevel"});
  expect_refused(changed("gpt2", set("/post_processor", {{"type", "BertProcessing"}})), {"post_processor", "Bert"});
  expect_refused(changed("gpt2", set("/model/type", "Unigram")), {"Unigram", "expected BPE"});
  expect_refused(changed("gpt2", set("/model/dropout", 0.1)), {"'dropout' is 0.1"});
  expect_refused(changed("gpt2", set("/model/end_of_word_suffix", "</w>")), {"'end_of_word_suffix'", "</w>"});
  expect_refused(changed("llama2", set("/model/byte_fallback", 1)), {"'byte_fallback' must be true or false"});
  expect_refused(changed("gpt2", set("/added_tokens/0/lstrip", 1)), {"'lstrip' must be true or false"});
  expect_refused(changed("gpt2", set("/added_tokens/0/id", 7)), {"<unk>", "id 7, but the vocabulary assigns 0"});
  expect_refused(changed("gpt2", set("/added_tokens/3/id", 9999)), {"<|end|>", "id 9999; expected each of 0 to"});
  expect_refused(changed("gpt2", set("/model/vocab/a", -1)), {"\"a\"", "-1"});
  expect_refused(directory_with(R"({"model": {"vocab": {"b": 0, "a": 1, "b": 2}, "merges": []}})"),
                 {"tokenizer.json", "'vocab'", "\"b\" twice"});
  expect_refused(changed("gpt2", set("/model/vocab", {"a", 0})), {"'vocab' must be an object"});
  expect_refused(changed("gpt2", set("/model/vocab", Json::object())), {"'vocab' must be an object"});
  expect_refused(changed("gpt2", set("/model/merges/2", "no token")), {"merge 2", "'no'"});
  expect_refused(changed("gpt2", [](Json& json) { json["model"]["merges"][2] = json["model"]["merges"][1]; }),
                 {"merge 2", "twice"});
  expect_refused(changed("llama3", set("/post_processor/special_tokens", Json::object())), {"post_processor", "<s>"});
  expect_refused(changed("llama3", set("/post_processor/special_tokens/<s>/ids", {-3})), {"post_processor", "-3"});
  expect_refused(directory_with("{}"), {"tokenizer.json", "'model'"});
  expect_refused(directory_with("[]"), {"tokenizer.json", "'model'"});
  expect_refused(directory_with("nonsense"), {"tokenizer.json", "JSON"});
  expect_refused(emptied("made"), {"tokenizer.json", "vocab.json"});
}

// A pattern with exponentially many ways to split a run of one letter, and one that looks back from every position.
TEST_F(HubTokenizerTest, LimitsCatastrophicBacktracking) {
  for (const char* const regex : {"(a+)+$", "(a|aa)+b", "(?:a*)*c"}) {
    const auto folder =
        changed("llama3", [&](Json& json) { json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = regex; });
    const auto tokenizer = Tokenizer::open_folder(folder);
    expect_error(Status::usage, {"the pattern", "exceeds the time", "100003 bytes"},
                 [&] { tokenizer->encode(std::string(100'000, 'a') + "!bc"); });
    EXPECT_EQ(tokenizer->decode(tokenizer->encode("a!")), "a!");
  }
}

TEST_F(HubTokenizerTest, RejectsInvalidConfigurations) {
  expect_refused(configured("gpt2", {{"added_tokens_decoder", {{"x", "y"}}}}), {"'added_tokens_decoder'", "\"x\""});
  expect_refused(configured("gpt2", {{"bos_token", 3}}), {"tokenizer_config.json", "'bos_token'", "3"});
  expect_refused(configured("gpt2", {{"chat_template", 3}}), {"tokenizer_config.json", "'chat_template'"});
  expect_refused(configured("gpt2", Json::array()), {"tokenizer_config.json", "one object"});
  const Json several = {{{"name", "tools"}, {"template", "x"}}, {{"name", "default"}, {"template", "y"}}};
  EXPECT_EQ(Tokenizer::open_folder(configured("gpt2", {{"chat_template", several}}))->chat_template(), "y");
  file("made/chat_template.jinja", "z");
  EXPECT_EQ(Tokenizer::open_folder(path("made"))->chat_template(), "z");
  file("made/chat_template.jinja", "\xFF");
  expect_refused(path("made"), {"chat_template.jinja", "UTF-8"});
}

// As in transformers 5.24: if there is a tokenizer.json, its post_processor decides, whatever the class and keys.
TEST_F(HubTokenizerTest, AddsBosAndEosLikeTransformers) {
  // The tokenizer, keys in addition to bos_token and eos_token, and the tokens before and after a text.
  const std::tuple<const char*, Json, std::string, std::string> cases[] = {
      {"llama2", Json::object(), "<s>", ""},
      {"llama2", {{"add_bos_token", false}}, "<s>", ""},
      {"llama2", {{"add_eos_token", true}, {"tokenizer_class", "LlamaTokenizerFast"}}, "<s>", ""},
      {"llama2", {{"add_bos_token", nullptr}}, "<s>", ""},
      {"gpt2", Json::object(), "", ""},
      {"gpt2", {{"add_bos_token", true}, {"tokenizer_class", "GPT2TokenizerFast"}}, "", ""}};
  for (const auto& [from, more, before, after] : cases) {
    SCOPED_TRACE(from + more.dump());
    Json config = {{"bos_token", "<s>"}, {"eos_token", "</s>"}};
    config.update(more);
    const auto tokenizer = Tokenizer::open_folder(configured(from, config));
    const std::vector<int32_t> plain = tokenizer->encode("a b"),
                               all = tokenizer->encode_with("a b", {.add_ends = true});
    ASSERT_EQ(all.size(), plain.size() + (before.empty() ? 0 : 1) + (after.empty() ? 0 : 1));
    EXPECT_EQ(tokenizer->beginning().size(), before.empty() ? 0U : 1U);
    EXPECT_TRUE(before.empty() || tokenizer->token_bytes(all.front()) == before);
    EXPECT_TRUE(after.empty() || tokenizer->token_bytes(all.back()) == after);
  }
}

// Expected ids are those of transformers 5.24 for the same files.
TEST_F(HubTokenizerTest, ReadsCompanionFilesLikeTransformers) {
  const auto token = [](const char* name, bool special) { return Json{{"content", name}, {"special", special}}; };
  const Json config = {{"eos_token", "<s>"}, {"pad_token", "<|z|>"}};
  const Json map = {
      {"eos_token", "</s>"}, {"pad_token", token("[PAD]", false)}, {"additional_special_tokens", {"<|x|>"}}};
  // tokenizer_config.json, special_tokens_map.json, added_tokens.json; ids of <|x|>, <|y|>, [PAD], <|z|> and the end.
  const std::tuple<Json, Json, Json, std::vector<int32_t>> cases[] = {
      {{{"pad_token", "[PAD]"}, {"additional_special_tokens", {"<|x|>"}}, {"image_token", "<|y|>"}},
       {},
       {},
       {405, 404, 403, -1, -1}},
      {config, map, {}, {404, -1, 403, -1, 2}},
      {config, {{"eos_token", nullptr}}, {}, {-1, -1, -1, 403, -1}},
      {{{"eos_token", "<s>"},
        {"added_tokens_decoder", {{"900", token("<|y|>", true)}, {"800", token("<|x|>", false)}}}},
       map,
       {{"<|z|>", 700}},
       {403, 404, -1, -1, 1}},
      {{{"eos_token", "<s>"}}, {}, {{"<|z|>", 701}, {"<|x|>", 700}}, {403, -1, -1, 404, 1}},
      {{{"eos_token", "<none>"}}, {}, {}, {-1, -1, -1, -1, 403}},
      {{{"eos_token", "a"}}, {}, {}, {-1, -1, -1, -1, 67}}};
  for (const auto& [settings, names, added, ids] : cases) {
    SCOPED_TRACE(settings.dump());
    const auto folder = configured("gpt2", settings);
    if (!names.is_null()) file("made/special_tokens_map.json", names.dump());
    if (!added.is_null()) file("made/added_tokens.json", added.dump());
    const auto tokenizer = Tokenizer::open_folder(folder);
    EXPECT_EQ(tokenizer->document_end().value_or(-1), ids[4]);
    for (size_t i = 0; const char* const name : {"<|x|>", "<|y|>", "[PAD]", "<|z|>"}) {
      const int32_t id = ids[i++];
      EXPECT_EQ(tokenizer->special(name).value_or(-1), id) << name;
      EXPECT_EQ(tokenizer->encode_with(name, {.special_in_text = true}) == std::vector{id}, id >= 0) << name;
    }
    EXPECT_EQ(Tokenizer::from_json(tokenizer->to_json(), "kept")->files(), tokenizer->files());
  }
}

// Expected ids are those of AutoTokenizer in transformers 5.24: some classes define these components themselves.
TEST_F(HubTokenizerTest, TokenizerClassOverridesTokenizerJson) {
  const std::vector<int32_t> first{352, 302, 262, 301, 2, 270, 271, 272, 273, 379},
      always{352, 302, 262, 301, 2, 379, 379}, stored{345, 352, 302, 262, 301, 2, 379, 379},
      gpt2{279, 86, 9, 85, 2, 19, 20, 21, 22, 323}, prefixed{279, 86, 9, 85, 2, 323, 323},
      qwen{279, 86, 9, 85, 2, 19, 20, 21, 22, 223, 19, 20, 21, 22};
  const Json generic = {{"tokenizer_class", "PreTrainedTokenizerFast"}},
             llama = {{"tokenizer_class", "LlamaTokenizer"}};
  const std::tuple<const char*, Json, const char*, std::vector<int32_t>> cases[] = {
      {"llama2", llama, "", first},
      {"llama2", {{"tokenizer_class", "LlamaTokenizerFast"}, {"legacy", true}}, "", always},
      {"llama2", {{"tokenizer_class", "LlamaTokenizer"}, {"add_prefix_space", false}}, "", first},
      {"llama2", generic, "", stored},
      {"llama2", llama, "mistral", stored},
      {"llama2", Json::object(), "llama", stored},
      {"gpt2", {{"tokenizer_class", "GPT2Tokenizer"}, {"add_prefix_space", true}}, "", prefixed},
      {"gpt2", {{"tokenizer_class", "Qwen2Tokenizer"}}, "", qwen},
      {"gpt2", llama, "", gpt2},
      {"gpt2", generic, "qwen2", qwen},
      {"gpt2", generic, "qwen3", gpt2},
      {"gpt2", Json::object(), "qwen3", qwen}};
  for (const auto& [name, settings, type, ids] : cases) {
    const auto folder = configured(name, settings);
    if (*type != 0) file("made/config.json", Json{{"model_type", type}}.dump());
    EXPECT_EQ(Tokenizer::open_folder(folder)->encode_with(" it's</s>1234 1234", {.special_in_text = true}), ids)
        << name << settings << type;
  }
}

// The library searches a text for added tokens before Metaspace changes its spaces.
TEST_F(HubTokenizerTest, MetaspaceAppliesAfterAddedTokens) {
  const auto folder = changed("mistral", [](Json& json) {
    for (const char* const name : {"<n>", "the end"}) {
      Json token = special_token(std::string(name) == "<n>" ? 493 : 494, name);
      token["special"] = false, token["normalized"] = true;
      token["lstrip"] = token["rstrip"] = std::string(name) == "<n>";
      json["added_tokens"].push_back(token);
    }
  });
  EXPECT_EQ(Tokenizer::open_folder(folder)->encode("a <n> b the end"), (std::vector<int32_t>{351, 493, 288, 346, 494}));
}

TEST_F(HubTokenizerTest, ReadsVocabAndMergesForTokenizerClass) {
  const Json model = to_json(tokenizer_fixture("gpt2") / "tokenizer.json")["model"];
  std::string merges = "#version: 0.2\n";
  for (const Json& merge : model["merges"])
    merges += (merge.is_string() ? merge.get<std::string>()
                                 : merge[0].get<std::string>() + " " + merge[1].get<std::string>()) +
              "\n";
  const std::vector<int32_t> gpt2{400, 75, 86, 9, 85, 323, 365, 223, 130, 105, 16, 201},
      qwen{400, 75, 86, 9, 85, 223, 19, 20, 21, 22, 365, 223, 130, 105, 16, 201};
  std::vector<int32_t> marked = gpt2;
  marked.insert(marked.begin(), 1), marked.push_back(2);
  const auto folder = [&](const Json& config) {
    const auto made = emptied("made");
    file("made/vocab.json", model["vocab"].dump());
    file("made/merges.txt", merges);
    file("made/added_tokens.json", R"({"<|x|>": 900})");
    file("made/tokenizer_config.json", config.dump());
    return made;
  };
  const Json ends = {{"bos_token", "<s>"}, {"eos_token", "</s>"}, {"add_bos_token", true}, {"add_eos_token", true}};
  for (const auto& [config, ids] : {std::pair<Json, std::vector<int32_t>>{{{"tokenizer_class", "GPT2Tokenizer"}}, gpt2},
                                    {ends, marked},
                                    {{{"tokenizer_class", "Qwen2TokenizerFast"}}, qwen},
                                    {{{"tokenizer_class", "Qwen2Tokenizer"}, {"add_bos_token", true}}, qwen}})
    EXPECT_EQ(Tokenizer::open_folder(folder(config))
                  ->encode_with("<|x|>it's 1234\n\n \u00e9.\n", {.special_in_text = true, .add_ends = true}),
              ids)
        << config;
  expect_refused(folder({{"tokenizer_class", "RobertaTokenizer"}}), {"'tokenizer_class'", "RobertaTokenizer"});
}

// The ids of generation_config.json, else of config.json, else of the tokenizer; they are copied with the tokenizer.
TEST_F(HubTokenizerTest, ReadsEosTokensFromModelConfiguration) {
  const int32_t own = Tokenizer::open_folder(tokenizer_fixture("smollm"))->document_end().value();
  const std::tuple<const char*, const char*, std::vector<int32_t>> cases[] = {
      {nullptr, nullptr, {own}},
      {nullptr, R"({"eos_token_id": 7})", {7}},
      {R"({"eos_token_id": [8, 9]})", R"({"eos_token_id": 7})", {8, 9}},
      {R"({"eos_token_id": null, "top_p": 0.8})", R"({"eos_token_id": [7]})", {7}},
      {R"({"temperature": 0.7})", R"({"eos_token_id": null, "vocab": 1e999})", {own}},
      {R"({"eos_token_id": 3, "eta": 99999999999999999999999})", "{}", {3}}};
  std::string identity;
  for (const auto& [generation, config, ends] : cases) {
    const auto folder = configured("smollm", to_json(tokenizer_fixture("smollm") / "tokenizer_config.json"));
    if (generation) file("made/generation_config.json", generation);
    if (config) file("made/config.json", config);
    const auto tokenizer = Tokenizer::open_folder(folder);
    EXPECT_EQ(generation_ends(*tokenizer), ends) << (generation ? generation : "");
    const auto again = Tokenizer::from_json(tokenizer->to_json(), "kept");
    EXPECT_EQ(generation_ends(*again), ends);
    EXPECT_EQ(again->files(), tokenizer->files());
    if (identity.empty()) identity = tokenizer->identity();
    EXPECT_TRUE(again->identity() == identity) << "settings of a model do not belong to it";
  }
  file("made/generation_config.json", R"({"eos_token_id": "</s>"})");
  expect_refused(path("made"), {"generation_config.json", "'eos_token_id'"});
}

// transformers before 5 does not know TokenizersBackend; a directory that specifies no class gets the class of its
// model.
TEST_F(HubTokenizerTest, WritesTokenizerClassKnownToEveryTransformersVersion) {
  const auto folder = changed("gpt2", [](Json&) {});
  EXPECT_EQ(Json::parse(Tokenizer::open_folder(folder)->files().at("tokenizer_config.json")).at("tokenizer_class"),
            "PreTrainedTokenizerFast");
  file("made/tokenizer_config.json",
       R"({"tokenizer_class": "TokenizersBackend", "eos_token": "</s>", "pad_token": "<none>"})");
  EXPECT_EQ(Tokenizer::open_folder(folder)->files().at("tokenizer_config.json"),
            R"({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<none>"})");
}

// Ids and tokens of add_special_tokens() in tokenizers 0.23.3: for a new name, a word of the vocabulary, another new
// name, and an added token that was not special.
TEST_F(HubTokenizerTest, AddsTokensLikeHfTokenizers) {
  const std::tuple<const char*, int32_t, int32_t, std::vector<int32_t>> cases[] = {
      {"gpt2", 403, 331, {86, 299, 223, 403, 90, 223, 331, 223, 130, 105, 404}},
      {"roberta", 403, 334, {280, 300, 223, 403, 374, 223, 334, 223, 130, 105, 404}},
      {"llama3", 403, 333, {86, 297, 223, 403, 90, 223, 333, 223, 130, 105, 404}},
      {"qwen", 403, 327, {86, 295, 223, 403, 90, 223, 327, 223, 344, 404}},
      {"smollm", 403, 325, {86, 295, 223, 403, 90, 223, 325, 223, 130, 105, 404}},
      {"llama2", 493, 390, {354, 363, 345, 493, 418, 345, 390, 345, 345, 198, 172, 494}},
      {"mistral", 493, 389, {354, 362, 346, 493, 306, 346, 389, 346, 198, 172, 494}},
      {"words", 403, 133, {328, 88, 403, 158, 88, 133, 88, 0, 404}}};
  const TokenizerChoice choice{.added = {"<|new|>", "caf", "<|end of it|>", "<tool>"}, .end = "<|end of it|>"};
  for (const auto& [name, first, word, tokens] : cases) {
    const auto made = with_tokens(Tokenizer::open_folder(tokenizer_fixture(name)), choice);
    EXPECT_EQ(made->special("<|new|>"), first) << name;
    EXPECT_EQ(made->special("caf"), word) << name;
    EXPECT_EQ(made->document_end(), first + 1) << name;
    EXPECT_EQ(made->special("<tool>"), first - 2) << name;
    EXPECT_EQ(generation_ends(*made), std::vector<int32_t>{first + 1}) << name;
    EXPECT_EQ(made->encode_with("the <|new|>x caf é<|end of it|>", {.special_in_text = true}), tokens) << name;
    EXPECT_EQ(with_tokens(Tokenizer::from_json(made->to_json(), "kept"), choice)->to_json(), made->to_json()) << name;
  }
  TokenizerChoice bytes{.name = "bytes", .added = {"<a>"}, .end = "<a>"};
  const auto made = make_tokenizer(bytes, "text");
  EXPECT_EQ(made->document_end(), 256);
  EXPECT_EQ(made->encode_with("é\n<a>", {.special_in_text = true}), (std::vector<int32_t>{0xC3, 0xA9, '\n', 256}));
  EXPECT_EQ(cache_name({.name = "bytes"}), "bytes");
  EXPECT_NE(cache_name(bytes), "bytes");
  bytes.end = "<A>";
  expect_error(Status::usage, {"`end`", "1 special tokens", "got '<A>'; did you mean '<a>'?"},
               [&] { make_tokenizer(bytes, "text"); });
}

TEST_F(HubTokenizerTest, RejectsTooManyMerges) {
  std::string json = R"({"decoder":{"type":"Fuse"},"model":{"type":"BPE","vocab":{"a":0,"aa":1},"merges":[)";
  for (int i = 0; i < 1'000'000; ++i) json += i == 0 ? "\"a a\"" : ",\"a a\"";
  expect_refused(directory_with(json + "]}}"), {"1000000 merges; expected at most 600000"});
  std::filesystem::resize_file(path("made/tokenizer.json"), 200'000'000);  // sparse
  expect_refused(path("made"), {"200000000 bytes; expected at most"});
}

TEST_F(HubTokenizerTest, EncodesLongCharacterRunsInLinearTime) {
  const auto began = std::chrono::steady_clock::now();
  std::string marks = "a";
  for (int i = 0; i < 100'000; ++i) marks += i % 2 == 0 ? "\xCC\x81" : "\xCC\xA3";
  const std::string texts[] = {std::string(300'000, 'a'),   std::string(300'000, ' '), std::string(300'000, '\n'),
                               std::string(300'000, '\''),  std::string(300'000, '<'), marks,
                               std::string(300'000, '\xFF')};
  for (const char* const name : kTokenizers) {
    const auto tokenizer = Tokenizer::open_folder(tokenizer_fixture(name));
    for (const std::string& text : texts) EXPECT_FALSE(tokenizer->encode(text).empty());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(60));  // quadratic time would take hours
}

// Oniguruma's regcomp interprets these flags differently, and its regexec cannot read patterns compiled by the C
// library.
TEST(Oniguruma, DoesNotOverrideRegexOfCLibrary) {
  regex_t compiled;
  ASSERT_EQ(regcomp(&compiled, "tessera", REG_ICASE | REG_NOSUB), 0);
  EXPECT_EQ(regexec(&compiled, "TESSERA", 0, nullptr, 0), 0);
  regfree(&compiled);
}

}  // namespace
}  // namespace tessera
