// Prompts and rows for a model that others made: where its texts begin and end, by transformers 5.24 and torch 2.15 on
// the fixture, a small Llama whose tokenizer puts <s> before a text.
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

// The fixture reads 64 tokens, and "The moon" has at least three, with <s>.
TEST_F(PromptsTest, TextBeyondTheContextIsReported) {
  const std::string unread = "are not read: the context has 64\n";
  expect_lacks(generate("--ignore-end").err, "context");
  expect_has(generate("--ignore-end --tokens 99").err,
             "the text is longer than the context of 64 tokens: the beginning is not read for the end\n");
  std::string moons = "The moon";
  for (int i = 0; i < 70; ++i) moons += " moon";
  write("prompts.txt", "\uFEFFThe moon\r\n" + moons + "\r\n");
  const std::string all = "generate bos --temperature 0 --tokens 1 --threads-per-rank 1 --prompt";
  const Ran one = must(all + " '" + moons + "'"), several = must(all + "s prompts.txt --format json");
  const size_t begin = one.err.find("the prompt has ");
  ASSERT_NE(begin, std::string::npos) << one.err;
  const int count = std::stoi(one.err.substr(begin + 15));
  EXPECT_GT(count, 70);
  expect_has(one.err, fmt::format("the prompt has {} tokens; its first {} {}", count, count - 64, unread));
  expect_has(several.err, fmt::format("prompt 2 has {} tokens; its first {} {}", count, count - 64, unread));
  expect_lacks(several.err, "prompt 1 has");
  EXPECT_EQ(parse_records(several.out).at(0).at("prompt"), "The moon") << "no byte order mark";
  write("prompts.txt", std::string("\xff\xfeT\0", 4));
  fails("generate bos --prompts prompts.txt", 4, "prompts.txt is text in UTF-16, which 'iconv -f UTF-16 -t UTF-8'");
}

TEST_F(PromptsTest, MarkersAreTokensOnRequest) {
  const std::string marked = "generate bos --no-bos --prompt '<s>The moon' --temperature 0 --tokens 20 ";
  EXPECT_EQ(run(marked + "--special").out, "<s>The moon is a stone.\n");
  const Json text = run(marked + "--format json").last_record().at("text");
  EXPECT_NE(text, " is a stone.") << "read as three characters";
}

// The fixture ends a text with </s>, token 1; any other token may be made the end.
TEST_F(PromptsTest, GenerationStopsWhereTheModelsSettingsSay) {
  const Json whole = continued();
  EXPECT_EQ(whole.at("ended"), "end");
  say("bos/generation_config.json", "eos_token_id", 300);
  say("bos/config.json", "eos_token_id", 300);
  EXPECT_EQ(continued().at("ended"), "length") << "the tokenizer's own end is not asked";
  say("bos/generation_config.json", "eos_token_id", {300, 1});
  EXPECT_EQ(continued(), whole);
  fs::remove(path("bos/generation_config.json"));
  EXPECT_EQ(continued().at("ended"), "length") << "as config.json says";
  say("bos/config.json", "eos_token_id", nullptr);
  EXPECT_EQ(continued(), whole) << "as the tokenizer says";
}

TEST_F(PromptsTest, SettingsThatAreNotTakenAreNamed) {
  expect_lacks(generate("").err, "not taken");
  say("bos/generation_config.json", "top_p", 0.8);
  say("bos/generation_config.json", "repetition_penalty", 1.05);
  expect_has(generate("--top-p 0.8").err, "the model's own settings, which are not taken: repetition_penalty 1.05\n");
}

// A tokenizer may know more tokens than the model: only one that is met is refused.
TEST_F(PromptsTest, ATokenBeyondTheTableIsRefusedWhenItIsMet) {
  Json tokenizer = to_json("bos/tokenizer.json");
  Json token = tokenizer["added_tokens"][0];
  token["id"] = 400, token["content"] = "<pad>";
  tokenizer["added_tokens"].push_back(token);
  write("bos/tokenizer.json", tokenizer.dump());
  EXPECT_EQ(generate("").out, "The moon is a stone.\n");
  EXPECT_EQ(evaluate("rows.jsonl").at("tokens"), 102);
  fails("generate bos --special --prompt 'a<pad>'", 2,
        "--prompt: its token 400, '<pad>', is outside the model's embedding of 400 rows");
}

// Rows are the same, whatever the file is called and however it is compressed or laid out.
TEST_F(PromptsTest, AFigureDoesNotDependOnAName) {
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
  fails("evaluate bos --data mapped.jsonl", 4, "found body; --map assigns these keys");
}

// A template by which a run was trained is written where its tokenizer has none.
TEST_F(PromptsTest, ExportedFoldersHaveTheRunsTemplate) {
  must("train --init bos --data rows.jsonl --template chatml --steps 1 --batch 2 --threads-per-rank 1 --out tuned");
  must("checkpoint export tuned --out exported");
  expect_has(read_file(path("exported/chat_template.jinja")), "<|im_start|>");
}

// The ids of ends are in what others read, null where there is none: a key that is missing stands for another id.
TEST_F(PromptsTest, ExportedFoldersStopWhereTheRunStops) {
  const std::string said = generate("").out;
  must("checkpoint import bos --out imported");
  must("checkpoint export imported --out exported");
  for (const char* from : {"imported", "exported"}) EXPECT_EQ(generate("", from).out, said) << from;
  for (const char* file : {"exported/config.json", "exported/generation_config.json"})
    test::expect_values(to_json(file), {{"bos_token_id", 0}, {"eos_token_id", 1}}, file);
  for (const std::string kind : {"char", "bytes", "bpe-300"}) {
    const std::string trained = "run_" + kind, folder = "folder_" + kind;
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

// AutoTokenizer gives a qwen2 the rules of its own tokenizer (transformers 5.24, tokenization_auto.py,
// MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS): a model that was trained here with another one is written as a llama,
// with zeros behind attention. A window that no llama has leaves it a qwen2.
TEST_F(PromptsTest, AFolderOfBiasesHasTheTokenizerThatLiesInIt) {
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
    EXPECT_EQ(must("evaluate " + to + on_text).out, must("evaluate run_" + to + on_text).out);
    const std::string names = run("checkpoint inspect " + to).out;
    EXPECT_EQ(names.find("self_attn.o_proj.bias") != std::string::npos, window.empty());
  }
}

// SentencePiece's file, as older folders have it alone.
TEST_F(PromptsTest, ATokenizerOfSentencePieceIsNamed) {
  fs::remove(path("bos/tokenizer.json"));
  fails("generate bos --prompt x", 4, "no tokenizer; expected tokenizer.json, or vocab.json and merges.txt");
  write("bos/tokenizer.model", "\n\x0e\n\x05<unk>");
  fails("generate bos --prompt x", 4, "; tokenizer.model is not supported: AutoTokenizer.from_pretrained(FOLDER)");
}

// generate with a template: a model that was tuned on conversations is asked in their form, alone and turn by turn, and
// stops where a turn ends.

constexpr const char* kOwn =
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + eos_token + '\\n' }}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

class ChatTest : public ProgramTest {
 protected:
  // Conversations of one and of two turns, in which each question has one answer.
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
  // The tokenizer "tok", with a template where one is given; no answer has <|im_start|>.
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
  std::string said(const std::string& arguments, const std::string& before = "", const char* from = "tuned") const {
    return must(fmt::format("generate {} --temperature 0 --tokens 30 --threads-per-rank 1 {}", from, arguments), before)
        .out;
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
  fails("generate tuned --chat --prompt x", 2, "--chat: takes its turns from standard input");
}

// A template that is not known is refused before the first turn; one that raises ends the conversation where it does.
TEST_F(ChatTest, ATemplateThatIsWrongIsOneLine) {
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

TEST_F(ChatTest, ATurnEndsAtTheTemplatesOwnMarker) {
  make_tokenizer("");
  tune("--tokenizer tok --template chatml");
  EXPECT_EQ(said("--template chatml --prompt 'snow?'"), "white.\n") << "<|im_end|> ends a turn, not the text";
  EXPECT_NE(said("--template chatml --prompt 'snow?' --ignore-end"), "white.\n");
  EXPECT_EQ(said("--template auto --prompt 'snow?'"), "white.\n") << "what the run was told to learn";
  EXPECT_EQ(said("--chat", "echo 'snow?' |"), "white.\n");
  const std::string none = "--template: the model has none; expected chatml, llama3, alpaca or none";
  tune("--tokenizer tok --steps 1 --warmup 0 --out untold");
  fails("generate untold --template auto --prompt x", 2, none);
  fails("generate untold --chat", 2, none, "echo x |");
  fails("generate untold --system x --prompt x", 2, none);
  // Other programs stop where generation_config.json says.
  must("checkpoint export tuned --out folder");
  for (const char* file : {"folder/generation_config.json", "folder/config.json"})
    EXPECT_EQ(to_json(file).at("eos_token_id"), (Json{400, 401})) << file;
  EXPECT_EQ(said("--chat", "printf 'snow?\n' |", "folder"), "white.\n");
}

// As trainers save adapters: beside their own tokenizer and chat template, which count and not those of the base.
TEST_F(ChatTest, AdaptersHaveATokenizerOfTheirOwn) {
  make_tokenizer("");
  tune("--tokenizer tok --steps 1 --warmup 0 --out base");
  tune("--init base --lora-rank 8 --lora-targets all --template chatml");
  must("checkpoint export tuned --out adapters");
  must("checkpoint import adapters --out imported");
  const std::string answer = said("--chat", "echo 'snow?' |");
  for (const char* from : {"adapters", "imported"}) EXPECT_EQ(said("--chat", "echo 'snow?' |", from), answer) << from;
  const auto loss = [&](const std::string& words) {
    return must("evaluate adapters --data chat.jsonl --format json " + words).last_record().at("loss");
  };
  const Json by_chatml = loss("");
  EXPECT_EQ(by_chatml, loss("--template chatml"));
  write("adapters/chat_template.jinja", kOwn);
  EXPECT_NE(loss(""), by_chatml);
  fs::remove(path("adapters/tokenizer.json"));
  expect_has(run("evaluate adapters --data chat.jsonl").err, "adapters: no tokenizer.json: the tokenizer and the chat");
  fails("generate adapters --chat", 2, "the model has none", "true |");
}

// A tokenizer whose own template ends a turn with another token than a text ends with, as those of base models do.
TEST_F(ChatTest, AFolderStopsWhereItsTemplateEndsATurn) {
  std::string jinja = kOwn;
  jinja.replace(jinja.find("eos_token"), 9, "'<|im_end|>'");
  make_tokenizer(jinja, "<|im_start|>");
  tune("--tokenizer tok --steps 1 --warmup 0");
  const auto ends = [&](const std::string& from, const std::string& to) {
    must("checkpoint export " + from + " --out " + to);
    return to_json(to + "/generation_config.json").at("eos_token_id");
  };
  EXPECT_EQ(ends("tuned", "folder"), (Json{400, 401}));
  // A model that was trained elsewhere goes out as it came.
  write("folder/generation_config.json", R"({"eos_token_id": 400})");
  must("checkpoint import folder --out imported");
  EXPECT_EQ(ends("imported", "again"), Json(400));
}

// A run that was told to learn another template than the tokenizer came with is asked by it, and hands it on.
TEST_F(ChatTest, TheTemplateThatWasLearntGoesOut) {
  make_tokenizer("{{ messages[-1].content }} is");
  tune("--tokenizer tok --template chatml");
  EXPECT_EQ(said("--template auto --prompt 'snow?'"), "white.\n");
  must("checkpoint export tuned --out folder");
  EXPECT_EQ(said("--chat", "printf 'snow?\nsky?\n' |", "folder"), "white.\nblue.\n");
  // Alpaca's has no form in Jinja: the folder's is not the one that was learnt, and a line says so.
  tune("--tokenizer tok --template alpaca --context 256 --steps 1 --warmup 0 --out other");
  expect_has(must("checkpoint export other --out again").err, "not what the run learnt");
}

// The tokenizer of characters has no x either, by which the end of an answer was once looked for.
TEST_F(ChatTest, AMarkerThatIsNoTokenEndsATurnAsText) {
  for (const std::string kind : {"bytes", "char"}) {
    tune("--tokenizer " + kind + " --template chatml --context 128");
    test::expect_values(Json::parse(said("--template chatml --prompt 'snow?' --format json")),
                        {{"text", "white."}, {"ended", "stop"}}, kind);
    // A folder for others has the template in Jinja, which asks and ends in the same way.
    expect_has(anew("checkpoint export tuned --out folder").err,
               "a turn ends with the text <|im_end|>, which is no token");
    EXPECT_EQ(said("--chat", "printf 'snow?\n' |", "folder"), "white.\n") << kind;
  }
}

}  // namespace
}  // namespace tessera
