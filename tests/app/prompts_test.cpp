// Prompts and rows for a model that others made: where its texts begin and end, by transformers 5.24 and torch 2.15 on
// the fixture, a small Llama whose tokenizer puts <s> before a text.
#include <nlohmann/json.hpp>

#include "tests/app/program.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

class PromptsTest : public test::ProgramTest {
 protected:
  PromptsTest() {
    fs::copy(fs::path(TESSERA_SOURCE_DIR) / "tests/app/fixtures/bos", path("bos"));
    write("rows.jsonl",
          "{\"text\": \"The moon is a stone.\"}\n{\"text\": \"The sea is salt.\"}\n{\"text\": \"A rank is a "
          "worker.\"}\n{\"text\": \"A plan is a layout.\"}\n{\"text\": \"Red is a colour.\"}\n{\"text\": \"Seven is a "
          "number.\"}\n{\"text\": \"Water boils on a fire.\"}\n{\"text\": \"The river knows the town.\"}\n");
  }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
  }
  void say(const std::string& name, const char* key, const Json& value) const {
    Json file = fs::exists(path(name)) ? Json::parse(read_file(path(name))) : Json::object();
    file[key] = value;
    write(name, file.dump());
  }
  test::Ran generate(const std::string& more) const {
    return run("generate bos --prompt 'The moon' --temperature 0 --tokens 20 --threads-per-rank 1 " + more);
  }
  Json evaluate(const std::string& more) const {
    const test::Ran ran = run("evaluate bos --threads-per-rank 1 --format json --data " + more);
    EXPECT_EQ(ran.status, 0) << more << ran.err;
    return ran.status == 0 ? Json::parse(ran.out) : Json{{"loss", 0}, {"tokens", 0}};
  }
};

TEST_F(PromptsTest, TextsBeginAsTheTokenizersDo) {
  const Json rows = evaluate("rows.jsonl"), without = evaluate("rows.jsonl --no-bos");
  EXPECT_NEAR(rows.at("loss").get<double>(), 0.1736, 1e-3);
  EXPECT_EQ(rows.at("tokens"), 102);
  EXPECT_NEAR(without.at("loss").get<double>(), 0.3515, 1e-3);
  EXPECT_EQ(without.at("tokens"), 94);
  write("text.txt", "The moon is a stone.");
  EXPECT_EQ(evaluate("text.txt").at("tokens").get<int>(), evaluate("text.txt --no-bos").at("tokens").get<int>() + 1);
  EXPECT_EQ(generate("").out, "The moon is a stone.\n");
}

TEST_F(PromptsTest, MarkersAreTokensOnRequest) {
  const std::string marked = "generate bos --no-bos --prompt '<s>The moon' --temperature 0 --tokens 20 ";
  EXPECT_EQ(run(marked + "--special").out, "<s>The moon is a stone.\n");
  const Json text = Json::parse(run(marked + "--format json").out);
  EXPECT_NE(text.at("text"), " is a stone.") << "read as three characters";
}

// The fixture ends a text with </s>, token 1; any other token may be made the end.
TEST_F(PromptsTest, GenerationStopsWhereTheModelsSettingsSay) {
  const Json whole = Json::parse(generate("--format json").out);
  EXPECT_EQ(whole.at("ended"), "end");
  say("bos/generation_config.json", "eos_token_id", 300);
  say("bos/config.json", "eos_token_id", 300);
  EXPECT_EQ(Json::parse(generate("--format json").out).at("ended"), "length") << "the tokenizer's own end is not asked";
  say("bos/generation_config.json", "eos_token_id", {300, 1});
  EXPECT_EQ(Json::parse(generate("--format json").out), whole);
  fs::remove(path("bos/generation_config.json"));
  EXPECT_EQ(Json::parse(generate("--format json").out).at("ended"), "length") << "as config.json says";
  say("bos/config.json", "eos_token_id", nullptr);
  EXPECT_EQ(Json::parse(generate("--format json").out), whole) << "as the tokenizer says";
}

TEST_F(PromptsTest, SettingsThatAreNotTakenAreNamed) {
  EXPECT_EQ(generate("").err.find("not taken"), std::string::npos);
  say("bos/generation_config.json", "top_p", 0.8);
  say("bos/generation_config.json", "repetition_penalty", 1.05);
  EXPECT_NE(
      generate("--top-p 0.8").err.find("the model's own settings, which are not taken: repetition_penalty 1.05\n"),
      std::string::npos);
}

// A tokenizer may know more tokens than the model: only one that is met is refused.
TEST_F(PromptsTest, ATokenBeyondTheTableIsRefusedWhenItIsMet) {
  Json tokenizer = Json::parse(read_file(path("bos/tokenizer.json")));
  Json token = tokenizer["added_tokens"][0];
  token["id"] = 400, token["content"] = "<pad>";
  tokenizer["added_tokens"].push_back(token);
  write("bos/tokenizer.json", tokenizer.dump());
  EXPECT_EQ(generate("").out, "The moon is a stone.\n");
  EXPECT_EQ(evaluate("rows.jsonl").at("tokens"), 102);
  const test::Ran ran = generate("--special --prompt 'a<pad>'");
  EXPECT_EQ(ran.status, 2);
  EXPECT_EQ(ran.last_line(), "tessera: --prompt: its token 400, '<pad>', is beyond the model's table of 400");
}

// Rows are the same, whatever the file is called and however it is compressed or laid out.
TEST_F(PromptsTest, AFigureDoesNotDependOnAName) {
  const Json expected = evaluate("rows.jsonl");
  Json list = Json::array();
  const std::string rows = read_file(path("rows.jsonl"));
  for (size_t at = 0; at < rows.size(); at = rows.find('\n', at) + 1)
    list.push_back(Json::parse(rows.substr(at, rows.find('\n', at) - at)));
  for (const char* name : {"rows.ndjson", "rows.txt", "rows", "rows.json"}) {
    write(name, rows);
    EXPECT_EQ(evaluate(name), expected) << name;
  }
  write("pretty.json", list.dump(1));
  EXPECT_EQ(evaluate("pretty.json"), expected);
  ASSERT_EQ(std::system(fmt::format("gzip -c '{0}/pretty.json' > '{0}/packed'", path("").string()).c_str()), 0);
  EXPECT_EQ(evaluate("packed"), expected);
  write("mapped.jsonl", "{\"body\": \"The sea is salt.\"}\n");
  write("named.jsonl", "{\"text\": \"The sea is salt.\"}\n");
  EXPECT_EQ(evaluate("mapped.jsonl --map text=body"), evaluate("named.jsonl"));
  const test::Ran ran = run("evaluate bos --data mapped.jsonl");
  EXPECT_EQ(ran.status, 4);
  EXPECT_NE(ran.last_line().find("found body, and --map says which key is which"), std::string::npos) << ran.err;
}

// A template by which a run was trained is written where its tokenizer has none.
TEST_F(PromptsTest, ExportedFoldersHaveTheRunsTemplate) {
  ASSERT_EQ(run("train --init bos --data rows.jsonl --template chatml --steps 1 --batch 2 --threads-per-rank 1 --out "
                "tuned")
                .status,
            0);
  ASSERT_EQ(run("checkpoint export tuned --out exported").status, 0);
  EXPECT_NE(read_file(path("exported/chat_template.jinja")).find("<|im_start|>"), std::string::npos);
}

// The ids of ends are in what others read, null where there is none: a key that is missing stands for another id.
TEST_F(PromptsTest, ExportedFoldersStopWhereTheRunStops) {
  const std::string said = generate("").out;
  ASSERT_EQ(run("checkpoint import bos --out imported").status, 0);
  ASSERT_EQ(run("checkpoint export imported --out exported").status, 0);
  for (const char* from : {"imported", "exported"})
    EXPECT_EQ(run(fmt::format("generate {} --prompt 'The moon' --temperature 0 --tokens 20", from)).out, said) << from;
  for (const char* file : {"config.json", "generation_config.json"}) {
    const Json json = Json::parse(read_file(path("exported") / file));
    EXPECT_EQ(json.at("bos_token_id"), 0) << file;
    EXPECT_EQ(json.at("eos_token_id"), 1) << file;
  }
  for (const char* kind : {"char", "bytes", "bpe-300"}) {
    const std::string run_name = std::string("run_") + kind, folder = std::string("folder_") + kind;
    ASSERT_EQ(run(fmt::format("train --data text.txt --tokenizer {} --layers 1 --heads 2 --channels 16 --context 16 "
                              "--batch 4 --steps 2 --ranks 1 --threads-per-rank 1 --out {}",
                              kind, run_name))
                  .status,
              0);
    ASSERT_EQ(run(fmt::format("checkpoint export {} --out {}", run_name, folder)).status, 0);
    const Json config = Json::parse(read_file(path(folder) / "config.json"));
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"})
      EXPECT_TRUE(config.at(key).is_null()) << key;
    const Json about = Json::parse(read_file(path(folder) / "tokenizer_config.json"));
    EXPECT_EQ(about.at("tokenizer_class"), "PreTrainedTokenizerFast");
    const auto both = [&](const std::string& words) {
      EXPECT_EQ(run(fmt::format(fmt::runtime(words), run_name)).out, run(fmt::format(fmt::runtime(words), folder)).out);
    };
    both("generate {} --prompt Line --temperature 0 --tokens 12");
    both("evaluate {} --data text.txt");
  }
}

// AutoTokenizer gives a qwen2 the rules of its own tokenizer (transformers 5.24, tokenization_auto.py,
// MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS): a model that was trained here with another one is written as a llama,
// with zeros behind attention. A window that no llama has leaves it a qwen2.
TEST_F(PromptsTest, AFolderOfBiasesHasTheTokenizerThatLiesInIt) {
  for (const std::string window : {"", "--window 8 "}) {
    const std::string to = window.empty() ? "biased" : "sliding";
    ASSERT_EQ(run("train --data text.txt --tokenizer bpe-300 --model llama-nano --qkv-bias --layers 1 --heads 2 "
                  "--kv-heads 2 --channels 16 --context 16 --batch 4 --steps 9 --lr 0.05 --warmup 0 --ranks 1 "
                  "--threads-per-rank 1 --out run_" +
                  to + " " + window)
                  .status,
              0);
    const auto ran = run(fmt::format("checkpoint export run_{0} --out {0}", to));
    ASSERT_EQ(ran.status, 0) << ran.err;
    EXPECT_EQ(ran.err.find("Qwen2's own tokenizer") == std::string::npos, window.empty()) << ran.err;
    const Json config = Json::parse(read_file(path(to) / "config.json"));
    EXPECT_EQ(config.at("model_type"), window.empty() ? "llama" : "qwen2");
    EXPECT_EQ(config.value("attention_bias", false), window.empty());
    EXPECT_EQ(run(fmt::format("evaluate {} --data text.txt --dtype fp32", to)).out,
              run(fmt::format("evaluate run_{} --data text.txt --dtype fp32", to)).out);
    const std::string names = run("checkpoint inspect " + to).out;
    EXPECT_EQ(names.find("self_attn.o_proj.bias") != std::string::npos, window.empty());
  }
}

// SentencePiece's file, as older folders have it alone.
TEST_F(PromptsTest, ATokenizerOfSentencePieceIsNamed) {
  fs::remove(path("bos/tokenizer.json"));
  expect_failure("generate bos --prompt x", 4, "no tokenizer; expected tokenizer.json, or vocab.json and merges.txt");
  std::ofstream(path("bos/tokenizer.model")) << "\n\x0e\n\x05<unk>";
  expect_failure("generate bos --prompt x", 4, "; tokenizer.model is not read: AutoTokenizer.from_pretrained(FOLDER)");
}

}  // namespace
}  // namespace tessera
