// Prompts and rows for foreign models: begin and end tokens as in transformers 5.24 and torch 2.15, on the fixture, a
// small Llama whose tokenizer prepends <s>.
#include <cstdlib>
#include <map>
#include <string>

#include "tests/app/program.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

class PromptsTest : public ProgramTest {
 protected:
  PromptsTest() {
    fs::copy(fs::path(TESSERA_SOURCE_DIR) / "tests/app/fixtures/bos", path("bos"));
    std::string rows;
    for (const char* text :
         {"The moon is a stone.", "The sea is salt.", "A rank is a worker.", "A plan is a layout.", "Red is a colour.",
          "Seven is a number.", "Water boils on a fire.", "The river knows the town."})
      rows += Json{{"text", text}}.dump() + "\n";
    write("rows.jsonl", rows);
  }
  void say(const std::string& name, const char* key, const Json& value) const {
    Json file = fs::exists(path(name)) ? to_json(name) : Json::object();
    file[key] = value;
    write(name, file.dump());
  }
  Ran generate(const std::string& more, const std::string& from = "bos") const {
    return run("generate " + from + " --prompt 'The moon' --temperature 0 --tokens 20 --threads-per-rank 1 " + more);
  }
  Json continued() const { return generate("--format json").last_record(); }
  Json evaluate(const std::string& more) const {
    return must("evaluate bos --threads-per-rank 1 --format json --data " + more).last_record();
  }
};

TEST_F(PromptsTest, TextsBeginWithBosToken) {
  const Json rows = evaluate("rows.jsonl"), without = evaluate("rows.jsonl --no-bos");
  EXPECT_NEAR(rows.at("loss").get<double>(), 0.1736, 1e-3);
  EXPECT_EQ(rows.at("tokens"), 102);
  EXPECT_NEAR(without.at("loss").get<double>(), 0.3515, 1e-3);
  EXPECT_EQ(without.at("tokens"), 94);
  write("text.txt", "The moon is a stone.");
  EXPECT_EQ(evaluate("text.txt").at("tokens").get<int>(), evaluate("text.txt --no-bos").at("tokens").get<int>() + 1);
  EXPECT_EQ(generate("").out, "The moon is a stone.\n");
}

// The fixture has a context of 64 tokens, and "The moon" has at least three, including <s>.
TEST_F(PromptsTest, ReportsTextLongerThanContext) {
  const std::string unread = "are ignored, because the context length is 64\n";
  expect_lacks(generate("--ignore-end").err, "context");
  expect_has(generate("--ignore-end --tokens 99").err,
             "the text is longer than the context of 64 tokens; once it is full, the earliest tokens are ignored\n");
  std::string moons = "The moon";
  for (int i = 0; i < 70; ++i) moons += " moon";
  write("prompts.txt", "\uFEFFThe moon\r\n" + moons + "\r\n");
  const std::string all = "generate bos --temperature 0 --tokens 1 --threads-per-rank 1 --prompt";
  const Ran one = must(all + " '" + moons + "'"), several = must(all + "s prompts.txt --format json");
  const size_t begin = one.err.find("the prompt has ");
  ASSERT_NE(begin, std::string::npos) << one.err;
  const int count = std::stoi(one.err.substr(begin + 15));
  EXPECT_GT(count, 70);
  expect_has(one.err, fmt::format("the prompt has {} tokens; the first {} {}", count, count - 64, unread));
  expect_has(several.err, fmt::format("prompt 2 has {} tokens; the first {} {}", count, count - 64, unread));
  expect_lacks(several.err, "prompt 1 has");
  EXPECT_EQ(parse_records(several.out).at(0).at("prompt"), "The moon") << "no byte order mark";
  write("prompts.txt", std::string("\xff\xfeT\0", 4));
  fails("generate bos --prompts prompts.txt", 4, "prompts.txt is UTF-16 text, which 'iconv -f UTF-16 -t UTF-8'");
}

TEST_F(PromptsTest, EncodesSpecialTokensOnRequest) {
  const std::string marked = "generate bos --no-bos --prompt '<s>The moon' --temperature 0 --tokens 20 ";
  EXPECT_EQ(run(marked + "--special").out, "<s>The moon is a stone.\n");
  const Json text = run(marked + "--format json").last_record().at("text");
  EXPECT_NE(text, " is a stone.") << "read as three characters";
}

// The fixture ends a text with </s>, token 1; any other token may be configured.
TEST_F(PromptsTest, GenerationStopsAtEosTokensOfModel) {
  const Json complete = continued();
  EXPECT_EQ(complete.at("ended"), "end");
  say("bos/generation_config.json", "eos_token_id", 300);
  say("bos/config.json", "eos_token_id", 300);
  EXPECT_EQ(continued().at("ended"), "length") << "the tokenizer's end token is not used";
  say("bos/generation_config.json", "eos_token_id", {300, 1});
  EXPECT_EQ(continued(), complete);
  fs::remove(path("bos/generation_config.json"));
  EXPECT_EQ(continued().at("ended"), "length") << "as set in config.json";
  say("bos/config.json", "eos_token_id", nullptr);
  EXPECT_EQ(continued(), complete) << "as set by the tokenizer";
}

TEST_F(PromptsTest, ListsOverriddenGenerationSettings) {
  expect_lacks(generate("").err, "overridden");
  say("bos/generation_config.json", "top_p", 0.8);
  say("bos/generation_config.json", "repetition_penalty", 1.05);
  expect_has(generate("--top-p 0.8").err,
             "generation settings of the model that options override: repetition_penalty 1.05\n");
}

// The tokenizer may have more tokens than the model; only tokens that are used are rejected.
TEST_F(PromptsTest, RejectsTokensOutsideEmbeddingTableOnlyIfUsed) {
  Json tokenizer = to_json("bos/tokenizer.json");
  Json token = tokenizer["added_tokens"][0];
  token["id"] = 400, token["content"] = "<pad>";
  tokenizer["added_tokens"].push_back(token);
  write("bos/tokenizer.json", tokenizer.dump());
  EXPECT_EQ(generate("").out, "The moon is a stone.\n");
  EXPECT_EQ(evaluate("rows.jsonl").at("tokens"), 102);
  fails("generate bos --special --prompt 'a<pad>'", 2,
        "--prompt: token 400, '<pad>', is outside the model's embedding table of 400 rows");
}

// Rows are independent of file name, compression and layout.
TEST_F(PromptsTest, EvaluationIsIndependentOfFileNameAndFormat) {
  const Json expected = evaluate("rows.jsonl");
  const std::string rows = read_file(path("rows.jsonl"));
  for (const char* name : {"rows.ndjson", "rows.txt", "rows", "rows.json"}) {
    write(name, rows);
    EXPECT_EQ(evaluate(name), expected) << name;
  }
  write("pretty.json", Json(parse_records(rows)).dump(1));
  EXPECT_EQ(evaluate("pretty.json"), expected);
  ASSERT_EQ(std::system(fmt::format("gzip -c '{0}/pretty.json' > '{0}/packed'", path("").string()).c_str()), 0);
  EXPECT_EQ(evaluate("packed"), expected);
  write("mapped.jsonl", "{\"body\": \"The sea is salt.\"}\n");
  write("named.jsonl", "{\"text\": \"The sea is salt.\"}\n");
  EXPECT_EQ(evaluate("mapped.jsonl --map text=body"), evaluate("named.jsonl"));
  fails("evaluate bos --data mapped.jsonl", 4, "got body; --map assigns other names to these keys");
}

// The template of the training run is exported if the tokenizer has none.
TEST_F(PromptsTest, ExportWritesChatTemplateOfTraining) {
  must("train --init bos --data rows.jsonl --template chatml --steps 1 --batch 2 --threads-per-rank 1 --out tuned");
  must("checkpoint export tuned --out exported");
  expect_has(read_file(path("exported/chat_template.jinja")), "<|im_start|>");
}

// End token ids are written to all relevant files, null if there is none, since a missing key means a default id.
TEST_F(PromptsTest, ExportWritesEosTokens) {
  const std::string reply = generate("").out;
  must("checkpoint import bos --out imported");
  must("checkpoint export imported --out exported");
  for (const char* from : {"imported", "exported"}) EXPECT_EQ(generate("", from).out, reply) << from;
  for (const char* file : {"exported/config.json", "exported/generation_config.json"})
    test::expect_values(to_json(file), {{"bos_token_id", 0}, {"eos_token_id", 1}}, file);
  for (const std::string kind : {"char", "bytes", "bpe-300"}) {
    const std::string trained = "run_" + kind, folder = "directory_" + kind;
    train("--steps 2 --warmup 1 --ranks 1 --tokenizer " + kind + " --out " + trained);
    must("checkpoint export " + trained + " --out " + folder);
    test::expect_values(to_json(folder + "/config.json"),
                        {{"bos_token_id", nullptr}, {"eos_token_id", nullptr}, {"pad_token_id", nullptr}}, kind);
    EXPECT_EQ(to_json(folder + "/tokenizer_config.json").at("tokenizer_class"), "PreTrainedTokenizerFast");
    EXPECT_EQ(generate("--prompt Line", folder).out, generate("--prompt Line", trained).out);
    EXPECT_EQ(must("evaluate " + folder + " --data text.txt").out,
              must("evaluate " + trained + " --data text.txt").out);
  }
}

// AutoTokenizer replaces the tokenizer rules of qwen2 models (transformers 5.24, tokenization_auto.py,
// MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS), so a model trained here with another tokenizer is exported as llama, with
// zero biases of the attention output. With a window, which llama does not support, it remains qwen2, and Tessera reads
// it as transformers does, with the substituted tokenizer.
TEST_F(PromptsTest, ExportAvoidsQwen2TokenizerSubstitution) {
  for (const std::string window : {"", "--window 8 "}) {
    const std::string to = window.empty() ? "biased" : "sliding";
    train("--tokenizer bpe-300 --model llama-nano --qkv-bias --kv-heads 2 --steps 9 --lr 0.05 --warmup 0 --ranks 1 " +
          window + "--out run_" + to);
    const auto ran = must(fmt::format("checkpoint export run_{0} --out {0}", to));
    EXPECT_EQ(ran.err.find("Qwen2's own tokenizer") == std::string::npos, window.empty()) << ran.err;
    const Json config = to_json(to + "/config.json");
    EXPECT_EQ(config.at("model_type"), window.empty() ? "llama" : "qwen2");
    EXPECT_EQ(config.value("attention_bias", false), window.empty());
    const std::string on_text = " --data text.txt --dtype fp32";
    EXPECT_EQ(must("evaluate " + to + on_text).out == must("evaluate run_" + to + on_text).out, window.empty());
    const std::string names = run("checkpoint inspect " + to).out;
    EXPECT_EQ(names.find("self_attn.o_proj.bias") != std::string::npos, window.empty());
  }
}

// A SentencePiece file, the only tokenizer of some older folders.
TEST_F(PromptsTest, ErrorNamesSentencePieceTokenizer) {
  fs::remove(path("bos/tokenizer.json"));
  fails("generate bos --prompt x", 4, "no tokenizer; expected tokenizer.json, or vocab.json and merges.txt");
  write("bos/tokenizer.model", "\n\x0e\n\x05<unk>");
  fails("generate bos --prompt x", 4,
        "; tokenizer.model is not supported: convert it to tokenizer.json with AutoTokenizer.from_pretrained(FOLDER)");
}

// generate with a template: a model tuned on conversations is prompted in their format, for single prompts and turn by
// turn, and stops at the end of a turn.

constexpr const char* kOwn =
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + eos_token + '\\n' }}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

class ChatTest : public ProgramTest {
 protected:
  // Conversations of one or two turns, in which every question has one answer.
  ChatTest() {
    std::string rows;
    const std::pair<std::string, std::string> all[] = {{"snow", "white."}, {"sky", "blue."}, {"rose", "red."}};
    for (int i = 0; i < 40; ++i) {
      Json turns = Json::array();
      for (int t = 0; t <= i % 2; ++t) {
        const auto& [thing, colour] = all[static_cast<size_t>(i + t * (1 + i / 3)) % 3];
        turns.push_back({{"role", "user"}, {"content", thing + "?"}});
        turns.push_back({{"role", "assistant"}, {"content", colour}});
      }
      rows += Json{{"messages", turns}}.dump() + "\n";
    }
    write("chat.jsonl", rows);
  }
  // The tokenizer "tok", optionally with a template; no answer contains <|im_start|>.
  void make_tokenizer(const std::string& jinja, const char* end = "<|im_end|>") const {
    fs::create_directories(path("tok"));
    write("tok/tokenizer.json", chat_tokenizer().dump());
    const Json config = {{"eos_token", end}, {"chat_template", jinja}};
    write("tok/tokenizer_config.json", (jinja.empty() ? Json{{"eos_token", "<|im_start|>"}} : config).dump());
  }
  void tune(const std::string& more) const {
    anew("train " + kSmall +
         "--data chat.jsonl --model llama-nano --layers 2 --kv-heads 2 --channels 48 --context 96 --batch 8 --steps "
         "150 --warmup 5 --lr 0.01 --ranks 1 --out tuned " +
         more);
  }
  std::string reply(const std::string& arguments, const std::string& before = "", const char* from = "tuned") const {
    return must(fmt::format("generate {} --temperature 0 --tokens 30 --threads-per-rank 1 {}", from, arguments), before)
        .out;
  }
};

TEST_F(ChatTest, UsesChatTemplateOfModel) {
  make_tokenizer(kOwn);
  tune("--tokenizer tok");
  EXPECT_EQ(reply("--template auto --prompt 'snow?'"), "white.\n");
  EXPECT_EQ(reply("--template chatml --prompt 'snow?' --prompt 'sky?'"), "white.\n\nblue.\n");
  const Json one = Json::parse(reply("--template auto --prompt 'rose?' --format json"));
  EXPECT_EQ(one, (Json{{"prompt", "rose?"}, {"text", "red."}, {"tokens", one["tokens"]}, {"ended", "end"}}));
  EXPECT_TRUE(reply("--prompt 'snow?'").starts_with("snow?")) << "without a template the prompt is continued";
  for (const char* const plan : {"", "--tp 2 ", "--dp 2 "})
    EXPECT_EQ(reply(std::string(plan) + "--chat", "printf 'snow?\\n\\nsky?\\r\\nrose?' |"), "white.\nblue.\nred.\n")
        << plan;
  EXPECT_EQ(reply("--chat", "true |"), "");
  EXPECT_EQ(reply("--template auto --special --prompt 'snow?'"), "white.\n");
  fails("generate tuned --chat --prompt x", 2, "--chat: reads the conversation from standard input");
}

// Unknown templates are rejected before the first turn; a template that raises ends the conversation.
TEST_F(ChatTest, RejectsInvalidTemplateWithOneLineError) {
  make_tokenizer(kOwn);
  tune("--tokenizer tok");
  must("checkpoint export tuned --out folder");
  const auto with = [&](const std::string& jinja) { write("folder/chat_template.jinja", jinja); };
  with("{% for m in messages %}\n{% if m.content == 'sky?' %}{{ raise_exception('No sky.') }}{% endif %}{% endfor %}" +
       std::string(kOwn));
  const auto ran = run("generate folder --temperature 0 --tokens 20 --chat", "printf 'snow?\nsky?\nrose?\n' |");
  EXPECT_EQ(ran.status, 4);
  EXPECT_EQ(ran.out, "white.\n");
  EXPECT_EQ(ran.last_line(), "tessera: the conversation: chat_template:2: the template raises an error: No sky.");
  with("\n{{ messages | nosuch }}");
  fails("generate folder --chat", 2, "--template for the conversation: chat_template:2: unknown filter 'nosuch'",
        "true |");
}

TEST_F(ChatTest, TurnEndsAtTemplateMarker) {
  make_tokenizer("");
  tune("--tokenizer tok --template chatml");
  EXPECT_EQ(reply("--template chatml --prompt 'snow?'"), "white.\n") << "<|im_end|> ends a turn, not the text";
  EXPECT_NE(reply("--template chatml --prompt 'snow?' --ignore-end"), "white.\n");
  EXPECT_EQ(reply("--template auto --prompt 'snow?'"), "white.\n") << "the training template";
  EXPECT_EQ(reply("--chat", "echo 'snow?' |"), "white.\n");
  const std::string none = "--template: the model has none; expected chatml, llama3, alpaca or none";
  tune("--tokenizer tok --steps 1 --warmup 0 --out untold");
  fails("generate untold --template auto --prompt x", 2, none);
  fails("generate untold --chat", 2, none, "echo x |");
  fails("generate untold --system x --prompt x", 2, none);
  // Other programs use the end tokens in generation_config.json.
  must("checkpoint export tuned --out folder");
  for (const char* file : {"folder/generation_config.json", "folder/config.json"})
    EXPECT_EQ(to_json(file).at("eos_token_id"), (Json{400, 401})) << file;
  EXPECT_EQ(reply("--chat", "printf 'snow?\n' |", "folder"), "white.\n");
}

// Adapters saved by trainers have their own tokenizer and chat template, which take precedence over the base model's.
TEST_F(ChatTest, AdaptersUseTheirOwnTokenizer) {
  make_tokenizer("");
  tune("--tokenizer tok --steps 1 --warmup 0 --out base");
  tune("--init base --lora-rank 8 --lora-targets all --template chatml");
  must("checkpoint export tuned --out adapters");
  must("checkpoint import adapters --out imported");
  const std::string answer = reply("--chat", "echo 'snow?' |");
  for (const char* from : {"adapters", "imported"}) EXPECT_EQ(reply("--chat", "echo 'snow?' |", from), answer) << from;
  const auto loss = [&](const std::string& args) {
    return must("evaluate adapters --data chat.jsonl --format json " + args).last_record().at("loss");
  };
  const Json by_chatml = loss("");
  EXPECT_EQ(by_chatml, loss("--template chatml"));
  write("adapters/chat_template.jinja", kOwn);
  EXPECT_NE(loss(""), by_chatml);
  fs::remove(path("adapters/tokenizer.json"));
  expect_has(run("evaluate adapters --data chat.jsonl").err,
             "adapters: no tokenizer.json; using the tokenizer and chat");
  fails("generate adapters --chat", 2, "the model has none", "true |");
}

// A tokenizer whose template ends a turn with a token other than its end-of-text token, as is common for base models.
TEST_F(ChatTest, ExportedModelStopsAtTurnEndOfTemplate) {
  std::string jinja = kOwn;
  jinja.replace(jinja.find("eos_token"), 9, "'<|im_end|>'");
  make_tokenizer(jinja, "<|im_start|>");
  tune("--tokenizer tok --steps 1 --warmup 0");
  const auto ends = [&](const std::string& from, const std::string& to) {
    must("checkpoint export " + from + " --out " + to);
    return to_json(to + "/generation_config.json").at("eos_token_id");
  };
  EXPECT_EQ(ends("tuned", "folder"), (Json{400, 401}));
  // A foreign model is exported unchanged.
  write("folder/generation_config.json", R"({"eos_token_id": 400})");
  must("checkpoint import folder --out imported");
  EXPECT_EQ(ends("imported", "again"), Json(400));
}

// A run trained with a template other than its tokenizer's uses and exports the training template.
TEST_F(ChatTest, ExportsTrainingTemplate) {
  make_tokenizer("{{ messages[-1].content }} is");
  tune("--tokenizer tok --template chatml");
  EXPECT_EQ(reply("--template auto --prompt 'snow?'"), "white.\n");
  must("checkpoint export tuned --out folder");
  EXPECT_EQ(reply("--chat", "printf 'snow?\nsky?\n' |", "folder"), "white.\nblue.\n");
  // Alpaca has no Jinja template, so the folder's template differs from the training template, which is reported.
  tune("--tokenizer tok --template alpaca --context 256 --steps 1 --warmup 0 --out other");
  expect_has(must("checkpoint export other --out again").err, "differs from the one used in training");
}

// The character tokenizer also lacks the letter x, which ask() uses as a placeholder for an answer.
TEST_F(ChatTest, MultiTokenMarkerEndsTurn) {
  for (const std::string kind : {"bytes", "char"}) {
    tune("--tokenizer " + kind + " --template chatml --context 128");
    test::expect_values(Json::parse(reply("--template chatml --prompt 'snow?' --format json")),
                        {{"text", "white."}, {"ended", "stop"}}, kind);
    // Exported folders have an equivalent Jinja template.
    expect_has(anew("checkpoint export tuned --out folder").err,
               "a turn ends with the text <|im_end|>, which is not a single token");
    EXPECT_EQ(reply("--chat", "printf 'snow?\n' |", "folder"), "white.\n") << kind;
  }
}

}  // namespace
}  // namespace tessera
