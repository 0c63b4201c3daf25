// generate with a template: a model that was tuned on conversations is asked in their form, alone and turn by turn, and
// stops where a turn ends.
#include <nlohmann/json.hpp>

#include "tests/app/program.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kOwn =
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

class ChatTest : public test::ProgramTest {
 protected:
  // Conversations of one and of two turns, in which each question has one answer.
  ChatTest() {
    std::ofstream file(path("chat.jsonl"));
    const std::vector<std::pair<std::string, std::string>> all{{"snow", "white."}, {"sky", "blue."}, {"rose", "red."}};
    for (int i = 0; i < 40; ++i) {
      Json turns = Json::array();
      for (int t = 0; t <= i % 2; ++t) {
        const auto& [thing, colour] = all[static_cast<size_t>(i + t * (1 + i / 3)) % 3];
        turns.push_back({{"role", "user"}, {"content", thing + "?"}});
        turns.push_back({{"role", "assistant"}, {"content", colour}});
      }
      file << Json{{"messages", turns}} << "\n";
    }
  }
  // A tokenizer of some words and <|im_start|> and <|im_end|>, with a template where one is given.
  void make_tokenizer(const std::string& jinja) const {
    const fs::path source = fs::path(TESSERA_SOURCE_DIR) / "tests/data/fixtures/tokenizers/smollm";
    Json tokenizer = Json::parse(read_file(source / "tokenizer.json"));
    for (Json& token : tokenizer["added_tokens"]) {
      if (token["id"] == 400) token["content"] = "<|im_start|>", token["special"] = true;
      if (token["id"] == 401) token["content"] = "<|im_end|>", token["special"] = true;
    }
    Json config{{"eos_token", "<|im_start|>"}};  // which no answer has
    if (!jinja.empty()) config = {{"eos_token", "<|im_end|>"}, {"chat_template", jinja}};
    fs::create_directories(path("tok"));
    std::ofstream(path("tok/tokenizer.json")) << tokenizer;
    std::ofstream(path("tok/tokenizer_config.json")) << config;
  }
  void tune(const std::string& more) const {
    const auto ran =
        run("train --data chat.jsonl --model llama-nano --layers 2 --heads 2 --kv-heads 2 --channels 48 --context 96 "
            "--batch 8 --steps 150 --warmup 5 --lr 0.01 --threads-per-rank 1 --ranks 1 --out tuned " +
            more);
    ASSERT_EQ(ran.status, 0) << ran.err;
  }
  // A run of one step, which was told no template.
  void begin(const std::string& out) const {
    const auto ran =
        run("train --data chat.jsonl --model llama-nano --layers 1 --heads 2 --kv-heads 2 --channels 16 --context 96 "
            "--steps 1 --batch 2 --ranks 1 --threads-per-rank 1 --tokenizer tok --out " +
            out);
    ASSERT_EQ(ran.status, 0) << ran.err;
  }
  std::string said(const std::string& arguments, const std::string& before = "") const {
    const auto ran = run("generate tuned --temperature 0 --tokens 20 --threads-per-rank 1 " + arguments, before);
    EXPECT_EQ(ran.status, 0) << ran.err;
    return ran.out;
  }
};

TEST_F(ChatTest, AModelsOwnTemplateAsksAndEnds) {
  make_tokenizer(kOwn);
  tune("--tokenizer tok");
  EXPECT_EQ(said("--template auto --prompt 'snow?'"), "white.\n");
  EXPECT_EQ(said("--template chatml --prompt 'snow?' --prompt 'sky?'"), "white.\n\nblue.\n");
  const Json one = Json::parse(said("--template auto --prompt 'rose?' --format json"));
  EXPECT_EQ(one, (Json{{"prompt", "rose?"}, {"text", "red."}, {"tokens", one["tokens"]}, {"ended", "end"}}));
  EXPECT_TRUE(said("--prompt 'snow?'").starts_with("snow?")) << "without a template the prompt is continued";
  for (const char* const plan : {"", "--tp 2 ", "--dp 2 "})
    EXPECT_EQ(said(std::string(plan) + "--chat", "printf 'snow?\\n\\nsky?\\r\\nrose?' |"), "white.\nblue.\nred.\n")
        << plan;
  EXPECT_EQ(said("--chat", "true |"), "");
  EXPECT_EQ(said("--template auto --special --prompt 'snow?'"), "white.\n");
  expect_failure("generate tuned --chat --prompt x", 2, "--chat: takes its turns from standard input");
}

// A template that is not known is refused before the first turn; one that raises ends the conversation where it does.
TEST_F(ChatTest, ATemplateThatIsWrongIsOneLine) {
  make_tokenizer(kOwn);
  tune("--tokenizer tok");
  ASSERT_EQ(run("checkpoint export tuned --out folder").status, 0);
  const auto with = [&](const std::string& jinja) { std::ofstream(path("folder/chat_template.jinja")) << jinja; };
  with("{% for m in messages %}\n{% if m.content == 'sky?' %}{{ raise_exception('No sky.') }}{% endif %}{% endfor %}" +
       std::string(kOwn));
  const auto ran = run("generate folder --temperature 0 --tokens 20 --chat", "printf 'snow?\nsky?\nrose?\n' |");
  EXPECT_EQ(ran.status, 4);
  EXPECT_EQ(ran.out, "white.\n");
  EXPECT_EQ(ran.last_line(), "tessera: the conversation: chat_template:2: the template refuses this: No sky.");
  with("\n{{ messages | nosuch }}");
  expect_failure("generate folder --chat", 2,
                 "--template for the conversation: chat_template:2: the filter 'nosuch' is not known", "true |");
}

TEST_F(ChatTest, ATurnEndsAtTheTemplatesOwnMarker) {
  make_tokenizer("");
  tune("--tokenizer tok --template chatml");
  EXPECT_EQ(said("--template chatml --prompt 'snow?'"), "white.\n") << "<|im_end|> ends a turn, not the text";
  EXPECT_NE(said("--template chatml --prompt 'snow?' --ignore-end"), "white.\n");
  EXPECT_EQ(said("--template auto --prompt 'snow?'"), "white.\n") << "what the run was told to learn";
  EXPECT_EQ(said("--chat", "echo 'snow?' |"), "white.\n");
  const std::string none = "--template: the model has none of its own; expected chatml, llama3, alpaca or none";
  begin("another");
  expect_failure("generate another --template auto --prompt x", 2, none);
  expect_failure("generate another --chat", 2, none, "echo x |");
  expect_failure("generate another --system x --prompt x", 2, none);
  // Other programs stop where generation_config.json says.
  ASSERT_EQ(run("checkpoint export tuned --out folder").status, 0);
  for (const char* file : {"folder/generation_config.json", "folder/config.json"})
    EXPECT_EQ(Json::parse(read_file(path(file))).at("eos_token_id"), (Json{400, 401})) << file;
  EXPECT_EQ(run("generate folder --temperature 0 --tokens 20 --chat", "printf 'snow?\n' |").out, "white.\n");
}

// A tokenizer whose own template ends a turn with another token than a text ends with, as those of base models do.
TEST_F(ChatTest, AFolderStopsWhereItsTemplateEndsATurn) {
  std::string jinja = kOwn;
  jinja.replace(jinja.find("eos_token"), 9, "'<|im_end|>'");
  make_tokenizer(jinja);
  std::ofstream(path("tok/tokenizer_config.json")) << Json{{"eos_token", "<|im_start|>"}, {"chat_template", jinja}};
  begin("tuned");
  const auto ends = [&](const std::string& from, const std::string& to) {
    EXPECT_EQ(run("checkpoint export " + from + " --out " + to).status, 0);
    return Json::parse(read_file(path(to + "/generation_config.json"))).at("eos_token_id");
  };
  EXPECT_EQ(ends("tuned", "folder"), (Json{400, 401}));
  // A model that was trained elsewhere goes out as it came.
  std::ofstream(path("folder/generation_config.json")) << Json{{"eos_token_id", 400}};
  ASSERT_EQ(run("checkpoint import folder --out imported").status, 0);
  EXPECT_EQ(ends("imported", "again"), Json(400));
}

// A run that was told to learn another template than the tokenizer came with is asked by it, and hands it on.
TEST_F(ChatTest, TheTemplateThatWasLearntGoesOut) {
  make_tokenizer("{{ messages[-1].content }} is");
  tune("--tokenizer tok --template chatml");
  EXPECT_EQ(said("--template auto --prompt 'snow?'"), "white.\n");
  ASSERT_EQ(run("checkpoint export tuned --out folder").status, 0);
  EXPECT_EQ(run("generate folder --temperature 0 --tokens 20 --chat", "printf 'snow?\nsky?\n' |").out,
            "white.\nblue.\n");
  // Alpaca's has no form in Jinja: the folder's is not the one that was learnt, and a line says so.
  begin("other --template alpaca --context 256");
  EXPECT_NE(run("checkpoint export other --out again").err.find("not what the run learnt"), std::string::npos);
}

// The tokenizer of characters has no x either, by which the end of an answer was once looked for.
TEST_F(ChatTest, AMarkerThatIsNoTokenEndsATurnAsText) {
  for (const std::string kind : {"bytes", "char"}) {
    fs::remove_all(path("tuned"));
    fs::remove_all(path("folder"));
    tune("--tokenizer " + kind + " --template chatml --context 128");
    const Json one = Json::parse(said("--template chatml --prompt 'snow?' --format json --tokens 30"));
    EXPECT_EQ(one["text"], "white.") << kind;
    EXPECT_EQ(one["ended"], "stop") << kind;
    // A folder for others has the template in Jinja, which asks and ends in the same way.
    const auto ran = run("checkpoint export tuned --out folder");
    ASSERT_EQ(ran.status, 0);
    EXPECT_NE(ran.err.find("a turn ends with the text <|im_end|>, which is no token"), std::string::npos);
    EXPECT_EQ(run("generate folder --temperature 0 --tokens 30 --chat", "printf 'snow?\n' |").out, "white.\n") << kind;
  }
}

}  // namespace
}  // namespace tessera
