// Examples for fine-tuning: the shapes of a line, the templates, and what is trained of them.
#include "data/examples.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "data/jinja/template.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::string refused(std::string_view line) {
  return error_of([&] { render(parse_example(line, "f:3"), ChatTemplate::automatic, "f:3"); }, Status::input);
}

TEST(Jsonl, HasFourShapes) {
  const Example chat = parse_example(
      R"({"id": 7, "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé"}]})",
      "f:1");
  EXPECT_EQ(chat.shape, Example::Shape::messages);
  ASSERT_EQ(chat.turns.size(), 2U);
  EXPECT_EQ(chat.turns[0].role, Role::system);
  EXPECT_EQ(chat.turns[1].text, "Hé");
  const Example completion = parse_example(R"({"prompt": "1+1=", "completion": "2"})", "f:1");
  EXPECT_EQ(completion.shape, Example::Shape::completion);
  EXPECT_EQ(completion.turns[1].text, "2");
  // Alpaca's own files have a text beside the rest.
  const Example instruction =
      parse_example(R"({"instruction": "Add.", "input": "1 1", "output": "2", "text": "all of it"})", "f:1");
  EXPECT_EQ(instruction.shape, Example::Shape::instruction);
  EXPECT_EQ(instruction.input, "1 1");
  EXPECT_EQ(parse_example(R"({"instruction": "Add.", "output": "2"})", "f:1").input, "");
  EXPECT_EQ(parse_example(R"({"text": "once"})", "f:1").shape, Example::Shape::text);
}

TEST(Jsonl, NamesTheLineThatIsWrong) {
  constexpr const char* kAmong =
      "f:3: expected input_ids, messages, conversations, prompt and completion, instruction and output, or text among "
      "its keys";
  const std::pair<const char*, std::string> cases[] = {
      {"{}", kAmong},
      {R"({"question": "a", "answer": "b"})",
       std::string(kAmong) + "; found answer, question, and `map` says which key is which"},
      {R"({"text": 3})", "f:3: the key 'text' is a number; expected a string"},
      {R"({"instruction": "Add."})", "f:3: the key 'output' is missing"},
      {R"({"instruction": "Add.", "output": null})", "f:3: the key 'output' is missing"},
      {R"({"messages": []})", "f:3: the key 'messages' must be a list of messages that is not empty"},
      {R"({"messages": [{"role": "critic", "content": ""}]})",
       "f:3: message 1: the role 'critic'; expected system, user, assistant or tool"},
      {R"({"messages": [{"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]}]})",
       "f:3: message 1 has the key 'tool_calls'; expected role, content and weight alone"},
      {R"({"messages": [{"role": "user", "content": "a", "weight": 1}]})",
       "f:3: message 1: the key 'weight' is 1; expected 0, or 1 of an assistant's"},
      {R"({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]})",
       "f:3: message 1: the key 'weight' is 0.5; expected 0, or 1 of an assistant's"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]})",
       "f:3: message 1: a part of the type \"image_url\"; expected text"},
      {R"({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]})",
       "f:3: the key 'tools' would change what a model reads; a row of messages has no place for it"},
      {R"({"prompt": "a", "completion": "b", "chosen": "c"})",
       "f:3: the key 'chosen' would change what a model reads; a row of prompt has no place for it"},
      {R"({"prompt": [{"role": "user", "content": "a"}], "completion": "b"})",
       "f:3: the key 'completion' must be a list of messages that is not empty"},
      {R"({"input_ids": [1, "2"]})", "f:3: the key 'input_ids' must be a list of whole numbers"},
      {R"({"input_ids": [[1, 2]]})", "f:3: the key 'input_ids' must be a list of whole numbers"},
      {R"({"input_ids": []})", "f:3: the key 'input_ids' is empty"},
      {R"({"input_ids": [1, 2], "labels": [1]})", "f:3: the key 'labels' has 1 numbers; expected 2, as input_ids has"},
      {R"({"input_ids": [1, 2], "labels": [1, 3]})", "f:3: label 1 is 3 and its token 2; expected that token or -100"},
      {R"({"input_ids": [1, 2], "attention_mask": [0, 1]})",
       "f:3: the key 'attention_mask' hides tokens before others; expected only the last ones hidden"},
      {"[1]", "f:3: expected an object"}};
  for (const auto& [row, why] : cases) EXPECT_EQ(refused(row), why) << row;
  EXPECT_TRUE(refused(R"({"text": "a", "text": "b"})").starts_with("f:3: the key 'text' stands twice"));
  EXPECT_TRUE(refused(R"({"text": "a)").starts_with("f:3: not valid JSON at byte"));
  EXPECT_TRUE(refused("{\"text\": \"\xff\"}").starts_with("f:3: not valid JSON at byte"));
}

TEST(Jsonl, LinesAreCountedWithTheBlankOnes) {
  std::vector<std::string> found;
  for_each_line_of(
      "\xEF\xBB\xBF"
      "a\r\n\n  \nb\n\nc",
      "f", [&](std::string_view line, int64_t number) { found.push_back(std::to_string(number) + std::string(line)); });
  EXPECT_EQ(found, (std::vector<std::string>{"1a\r", "4b", "6c"}));
}

// As text, with the response in brackets, and * for the end.
std::string shown(const Example& example, ChatTemplate style) {
  std::string out;
  bool within = false;
  for (const Piece& piece : render(example, style, "f:1")) {
    if (piece.response != within) out += within ? "]" : "[";
    within = piece.response;
    out += piece.kind == Piece::Kind::end ? "*" : piece.text;
  }
  return out + (within ? "]" : "");
}

TEST(ChatTemplates, AreThoseOfTheField) {
  const Example chat{
      Example::Shape::messages,
      {{Role::system, "S"}, {Role::user, " U "}, {Role::assistant, " A "}, {Role::user, "V"}, {Role::assistant, "B"}}};
  EXPECT_EQ(shown(chat, ChatTemplate::chatml),
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n U <|im_end|>\n<|im_start|>assistant\n[ A <|im_end|>]\n"
            "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n[B<|im_end|>]\n");
  EXPECT_EQ(shown(chat, ChatTemplate::automatic), shown(chat, ChatTemplate::chatml));
  EXPECT_EQ(shown(chat, ChatTemplate::llama3),
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[A<|eot_id|>]"
            "<|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[B<|eot_id|>]");
  EXPECT_EQ(shown(chat, ChatTemplate::alpaca),
            "S\n\n### Instruction:\n U \n\n### Response:\n[ A *]\n\n### Instruction:\nV\n\n### Response:\n[B*]");
  EXPECT_EQ(error_of([&] { render(chat, ChatTemplate::none, "f:1"); }, Status::input),
            "f:1: messages need a `template`: expected chatml, llama3 or alpaca, found none");

  const Example asked{Example::Shape::instruction, {{Role::user, "Add."}, {Role::assistant, "2"}}, "1 1"};
  EXPECT_EQ(shown(asked, ChatTemplate::automatic),
            "Below is an instruction that describes a task, paired with an input that provides further context. Write "
            "a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 1\n\n"
            "### Response:\n[2*]");
  EXPECT_EQ(shown(asked, ChatTemplate::none), "Add.\n1 1[2*]");
  const Example bare{Example::Shape::instruction, {{Role::user, "Add."}, {Role::assistant, "2"}}};
  EXPECT_EQ(shown(bare, ChatTemplate::automatic),
            "Below is an instruction that describes a task. Write a response that appropriately completes the "
            "request.\n\n### Instruction:\nAdd.\n\n### Response:\n[2*]");
  const Example completion{Example::Shape::completion, {{Role::user, "1+1="}, {Role::assistant, "2"}}};
  EXPECT_EQ(shown(completion, ChatTemplate::automatic), "1+1=[2*]");
  const Example text{Example::Shape::text, {{Role::assistant, "once"}}};
  EXPECT_EQ(shown(text, ChatTemplate::chatml), "[once*]");
}

// Rows as OpenAI, ShareGPT, TRL and Alpaca's successors write them, in ChatML without its markers' names.
TEST(Jsonl, ReadsTheShapesOfTheWorld) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"messages": null, "prompt": "a", "completion": "b"})", "user\na;assistant\n[b]"},
      {R"({"instruction": "a", "input": null, "output": "b"})", "user\na;assistant\n[b]"},
      {R"({"instruction": "a", "input": "c", "output": "b", "system": "s"})", "system\ns;user\na\nc;assistant\n[b]"},
      {R"({"instruction": "a", "output": "b", "system": "", "history": []})", "user\na;assistant\n[b]"},
      {R"({"messages": [{"role": "user", "content": "a", "name": null, "tool_calls": null},
                        {"role": "assistant", "content": "b", "refusal": null, "annotations": []}]})",
       "user\na;assistant\n[b]"},
      {R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "c"}]},
                        {"role": "assistant", "content": "b", "weight": 0}, {"role": "user", "content": "d", "weight": 0},
                        {"role": "assistant", "content": "e", "weight": 1}], "tools": []})",
       "user\nac;assistant\n{b};user\n{d};assistant\n[e]"},
      {R"({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "t", "tool_call_id": "1"},
                        {"role": "assistant", "content": "b"}]})",
       "user\na;tool\nt;assistant\n[b]"},
      {R"({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"})",
       "system\ns;user\na;assistant\n[b]"},
      {R"({"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})",
       "user\na;assistant\n[b]"},
      {R"({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
           "completion": [{"role": "assistant", "content": "d"}]})",
       "user\na;assistant\nb;user\nc;assistant\n[d]"}};
  for (const auto& [row, expected] : cases) {
    const Example example = parse_example(row, "f:1");
    std::string found;
    for (const Piece& p : render(example, ChatTemplate::chatml, "f:1"))
      if (p.kind == Piece::Kind::text && p.text != "\n")
        found += p.never ? "{" + p.text + "}" : p.response ? "[" + p.text + "]" : p.text;
      else if (p.text == "<|im_start|>" && !found.empty())
        found += ";";
    EXPECT_EQ(found, expected) << row;
  }
  EXPECT_EQ(parse_example(R"({"text": "a", "id": 7, "meta": {"x": 1}, "source": null})", "f:1").unread,
            (std::set<std::string>{"'id'", "'meta'"}));
  EXPECT_EQ(parse_example(R"({"messages": [{"role": "user", "content": "a", "name": "Ann"}]})", "f:1").unread,
            std::set<std::string>{"'name' of messages"});
  const Example tokens = parse_example(
      R"({"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]})", "f:1");
  EXPECT_EQ(tokens.tokens, (std::vector<int32_t>{5, 6, 7}));
  EXPECT_EQ(tokens.trained, (std::vector<bool>{false, true, true}));
  const Example system = parse_example(R"({"prompt": "a", "completion": "b", "system": "s"})", "f:1");
  EXPECT_EQ(error_of([&] { render(system, ChatTemplate::none, "f:1"); }, Status::input),
            "f:1: the key 'system' needs a `template`: expected chatml, llama3 or alpaca, found none");
  EXPECT_EQ(error_of(
                [&] {
                  render(parse_example(R"({"messages": [{"role": "tool", "content": "t"}]})", "f:1"),
                         ChatTemplate::alpaca, "f:1");
                },
                Status::input),
            "f:1: `template` alpaca has no place for the role tool; expected chatml or llama3");
}

TEST(Jsonl, KeysMayHaveOtherNames) {
  const KeyNames names = parse_key_names("prompt=question,completion=answer");
  const Example example = parse_example(R"({"question": "a", "answer": "b", "prompt": "old", "id": 1})", "f:1", names);
  EXPECT_EQ(shown(example, ChatTemplate::none), "a[b*]");
  EXPECT_EQ(example.unread, std::set<std::string>{"'id'"});
  // Names may be exchanged.
  EXPECT_EQ(shown(parse_example(R"({"prompt": "b", "completion": "a"})", "f:1",
                                parse_key_names("prompt=completion,completion=prompt")),
                  ChatTemplate::none),
            "a[b*]");
  EXPECT_EQ(error_of([&] { parse_example(R"({"question": "a"})", "f:1", names); }, Status::input),
            "f:1: the key 'answer', which `map` names, is missing");
  for (const char* bad : {"prompt", "prompt=", "question=prompt", "prompt=a,prompt=b", "=a"})
    EXPECT_TRUE(error_of([&] { parse_key_names(bad); }).starts_with("`map`: expected each of input_ids, ")) << bad;
  EXPECT_EQ(parse_key_names("text=a=b").at(0).second, "a=b");
}

// The template that an export writes makes the text of the built-in one.
TEST(ChatTemplates, OneThatIsExportedSaysTheSame) {
  const fs::path source = fs::path(TESSERA_SOURCE_DIR) / "tests/data/fixtures/tokenizers/smollm";
  nlohmann::json tokenizer = nlohmann::json::parse(read_file(source / "tokenizer.json"));
  const Example talk = parse_example(R"({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content":
      " a"}, {"role": "assistant", "content": "b "}, {"role": "user", "content": "c"}]})",
                                     "f:1");
  for (const ChatTemplate style : {ChatTemplate::chatml, ChatTemplate::llama3}) {
    const nlohmann::json config{{"chat_template", jinja_of(style)}, {"bos_token", "<|begin_of_text|>"}};
    for (nlohmann::json& token : tokenizer["added_tokens"])
      if (token["id"] == 400) token["content"] = "<|begin_of_text|>";
    const ModelTemplate own(HubTokenizer(
        {{"tokenizer.json", tokenizer.dump()}, {"tokenizer_config.json", config.dump()}}, tokenizer, "t/"));
    const auto text_of = [](const std::vector<Piece>& pieces) {
      std::string out;
      for (const Piece& piece : pieces) out += piece.text;
      return out;
    };
    EXPECT_EQ(text_of(own.render(talk, "f:1")), text_of(render(talk, style, "f:1")));
  }
  EXPECT_EQ(jinja_of(ChatTemplate::alpaca), "");
}

class LoadedExamples : public testing::Test {
 protected:
  fs::path write(const std::string& text) const {
    const fs::path file = folder_.path() / "f.jsonl";
    std::ofstream(file, std::ios::binary) << text;
    return file;
  }
  TemporaryName folder_{fs::temp_directory_path() / "tessera-examples"};
  LoadedExamples() { fs::create_directories(folder_.path()); }
};

const TokenizerChoice kBytes{.name = "bytes"};
constexpr const char* kGood = "{\"prompt\": \"ab\", \"completion\": \"cd\"}\n";

TEST_F(LoadedExamples, AreTokensOfPromptAndResponse) {
  const Dataset d = load_examples(write(std::string(kGood) + kGood + kGood), kBytes, {.context = 8});
  EXPECT_EQ(d.train_examples->examples(), 2);
  EXPECT_EQ(d.val_examples->examples(), 1);
  EXPECT_EQ(d.train_examples->targets(), 4);
  EXPECT_EQ(d.prompt(), (std::vector<int32_t>{'a', 'b'}));
  EXPECT_EQ(d.notes, std::vector<std::string>{
                         "the tokenizer has no token that ends a text: a model cannot learn where to stop"});
  ExampleOptions all{.responses_only = false, .context = 8};
  EXPECT_EQ(load_examples(write(std::string(kGood) + kGood), kBytes, all).train_examples->targets(), 3);
  const Dataset chat =
      load_examples(write("{\"instruction\": \"a\", \"output\": \"b\"}\n{\"instruction\": \"a\", \"output\": \"c\"}\n"),
                    {.name = "char"}, {.style = ChatTemplate::chatml, .context = 200});
  EXPECT_EQ(chat.notes,
            std::vector<std::string>{"the tokenizer has no <|im_end|>, <|im_start|>; written as text, which "
                                     "a message could hold too"});
  EXPECT_EQ(chat.tokenizer->decode(chat.prompt()), "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(chat.tokenizer->decode(chat.val_examples->target_tokens()), "c<|im_end|>");
}

// The forms that people, git, editors and compressors give one file: the same rows, whatever its name.
TEST_F(LoadedExamples, AreTheSameInEveryFormAndUnderEveryName) {
  const std::string one = "{\"prompt\": \"ab\", \"completion\": \"c[,]\\\"}\\\\d\"}",
                    two = "{\"prompt\": \"e\",\n \"completion\": \"f\"}",
                    flat = "{\"prompt\": \"e\", \"completion\": \"f\"}";
  const std::pair<const char*, std::string> files[] = {
      {"a.jsonl", one + "\n" + flat + "\n"},
      {"a.ndjson", one + "\r\n\r\n" + flat},
      {"a.txt", "\n " + one + "\n" + flat},
      {"noname", "\xEF\xBB\xBF" + one + "\n" + flat + "\n\n \n"},
      {"a.json", "[" + one + "," + two + "]"},
      {"a.jsonl", "\xEF\xBB\xBF [\r\n  " + one + " ,\r\n " + two + "\r\n]\r\n"},
      {"a.data", "[\n" + one + ",\n" + two + ",\n]"}};
  for (const auto& [name, bytes] : files) {
    const fs::path file = folder_.path() / name;
    std::ofstream(file, std::ios::binary) << bytes;
    EXPECT_TRUE(holds_examples(file)) << name << bytes;
    std::vector<std::string> notes;
    const auto rows = all_examples(file, ByteTokenizer(), {.context = 20}, notes);
    EXPECT_EQ(rows->examples(), 2) << name << bytes;
    EXPECT_EQ(ByteTokenizer().decode(rows->target_tokens()), "c[,]\"}\\df") << name << bytes;
  }
  const auto holds = [&](const std::string& name, const std::string& bytes) {
    std::ofstream(folder_.path() / name, std::ios::binary) << bytes;
    return holds_examples(folder_.path() / name);
  };
  EXPECT_FALSE(holds("b.txt", "{ int x; }\n"));
  EXPECT_FALSE(holds("b.txt", "[1] A. Author, a book.\n"));
  EXPECT_FALSE(holds("b.txt", ""));
  EXPECT_TRUE(holds("b.jsonl", "nonsense")) << "whose line is named";
  EXPECT_TRUE(holds("b.ndjson", ""));
  const auto refusal = [&](const std::string& bytes) {
    return error_of([&] { for_each_line_of(bytes, "f", [](std::string_view, int64_t) {}); }, Status::input);
  };
  EXPECT_EQ(refusal("[\n{\"text\": \"a\"},\n{\"text\": \"b\""), "f:3: the list of rows has no end behind this");
  EXPECT_EQ(refusal("[{\"text\": \"a\"}]\n{\"text\": \"b\"}"), "f:2: something behind the list of rows");
}

TEST_F(LoadedExamples, MayBeTokensAlready) {
  const fs::path file =
      write("{\"input_ids\": [97, 98, 99], \"labels\": [-100, -100, 99]}\n{\"input_ids\": [97, 98]}\n");
  for (const bool responses : {true, false}) {
    const Dataset d = load_examples(file, kBytes, {.responses_only = responses, .context = 8});
    EXPECT_EQ(d.train_examples->target_tokens(), std::vector<int32_t>{'c'});
    EXPECT_EQ(d.val_examples->target_tokens(), std::vector<int32_t>{'b'});
  }
  EXPECT_TRUE(
      error_of([&] { load_examples(file, {.name = "char"}, {.context = 8}); }, Status::input)
          .ends_with("f.jsonl:1: the key 'input_ids' needs a `tokenizer`: expected the folder whose tokens they are"));
  const fs::path far = write("{\"input_ids\": [97, 300]}\n");
  std::vector<std::string> notes;
  EXPECT_TRUE(error_of([&] { all_examples(far, ByteTokenizer(), {.context = 8}, notes); }, Status::input)
                  .ends_with(":1: token 300; expected one of the tokenizer's 256"));
  EXPECT_TRUE(error_of([&] { all_examples(far, ByteTokenizer(), {.context = 8, .vocab = 98}, notes); }, Status::input)
                  .ends_with(":1: token 300 is beyond the model's table of 98"));
}

TEST_F(LoadedExamples, KeysThatNothingReadsAreNamed) {
  const std::string row = "{\"prompt\": \"ab\", \"completion\": \"cd\", \"id\": 1}\n";
  const Dataset d = load_examples(write(row + row), kBytes, {.context = 8});
  EXPECT_EQ(d.notes.front(), "nothing reads the keys 'id'");
}

// Tokens that the tokenizer itself puts before a text stand before rows that begin with text.
TEST_F(LoadedExamples, BeginAsTheTokenizersTextsDo) {
  const TokenizerChoice bos{.name = std::string(TESSERA_SOURCE_DIR) + "/tests/app/fixtures/bos"};
  const auto first = [&](const std::string& row, ExampleOptions o) {
    o.context = 100;
    return load_examples(write(row + "\n" + row + "\n"), bos, o).prompt();
  };
  const std::string text = R"({"text": "The moon"})", pair = R"({"prompt": "The", "completion": " moon"})",
                    asked = R"({"instruction": "The", "output": "moon"})";
  EXPECT_EQ(first(text, {}), std::vector<int32_t>{0});
  EXPECT_NE(first(text, {.ends = false}), std::vector<int32_t>{0});
  EXPECT_EQ(first(pair, {}).front(), 0);
  EXPECT_EQ(first(asked, {}).front(), 0);
  EXPECT_NE(first(asked, {.style = ChatTemplate::chatml}).front(), 0) << "a template has its own beginning";
  const auto with = load_examples(write(text + "\n" + text + "\n"), bos, {.context = 100});
  const auto without = load_examples(write(text + "\n" + text + "\n"), bos, {.ends = false, .context = 100});
  EXPECT_EQ(with.train_examples->targets(), without.train_examples->targets() + 1);
}

// The tokenizer was made for chats: its markers are tokens, which nobody's message can hold, and its template is the
// one that `auto` means for messages.
TEST_F(LoadedExamples, MarkersAreTheTokenizersOwnTokens) {
  const fs::path source = fs::path(TESSERA_SOURCE_DIR) / "tests/data/fixtures/tokenizers/smollm",
                 made = folder_.path() / "chat";
  const auto with = [&](const std::string& jinja) {
    fs::remove_all(made);
    fs::create_directories(made);
    nlohmann::json tokenizer = nlohmann::json::parse(read_file(source / "tokenizer.json")),
                   config = nlohmann::json::parse(read_file(source / "tokenizer_config.json"));
    for (nlohmann::json& token : tokenizer["added_tokens"]) {
      if (token["id"] == 400) token["content"] = "<|im_start|>";
      if (token["id"] == 401) token["content"] = "<|im_end|>", token["special"] = true;
    }
    config["chat_template"] = jinja;
    std::ofstream(made / "tokenizer.json") << tokenizer.dump();
    std::ofstream(made / "tokenizer_config.json") << config.dump();
    return TokenizerChoice{.name = made.string()};
  };
  const fs::path file = write(
      "{\"messages\": [{\"role\": \"user\", \"content\": \"a <|im_end|>\"}, {\"role\": \"assistant\", \"content\": "
      "\"b\"}]}\n{\"messages\": [{\"role\": \"user\", \"content\": \"c\"}, {\"role\": \"assistant\", \"content\": "
      "\"d\"}]}\n");
  const std::string chatml =
      "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
      "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
  const Dataset d = load_examples(file, with(chatml), {.context = 60});
  EXPECT_TRUE(d.notes.empty()) << d.notes.front();
  const std::vector<int32_t> prompt = d.prompt();
  EXPECT_EQ(std::ranges::count(prompt, 400), 2);
  EXPECT_EQ(std::ranges::count(prompt, 401), 1) << "the one in the message is text";
  EXPECT_EQ(d.train_examples->target_tokens().back(), 401);

  const TokenizerChoice other = with("{{ messages }}\n{{ messages | in_its_own_way }}");
  const std::string refusal =
      "`template` for " + file.string() + ": chat_template:2: the filter 'in_its_own_way' is not";
  EXPECT_TRUE(error_of([&] { load_examples(file, other, {.skip_bad = true, .context = 60}); }).starts_with(refusal));
  EXPECT_NO_THROW(load_examples(file, other, {.style = ChatTemplate::chatml, .context = 60}));
  EXPECT_NO_THROW(load_examples(write(std::string(kGood) + kGood), other, {.context = 60})) << "no messages";
}

TEST_F(LoadedExamples, ABadLineIsNamedOrCounted) {
  const std::string good = kGood;
  const fs::path file = write(good + "{\"prompt\": \"ab\"}\n" + good +
                              "nonsense\n{\"prompt\": \"ab\", \"completion\": "
                              "\"\"}\n{\"prompt\": \"abcdefghij\", \"completion\": \"k\"}\n" +
                              good);
  const std::string name = file.string();
  const auto load = [&](bool skip) { return load_examples(file, kBytes, {.skip_bad = skip, .context = 8}); };
  EXPECT_EQ(error_of([&] { load(false); }, Status::input),
            name +
                ":2: expected input_ids, messages, conversations, prompt and completion, instruction and output, or "
                "text among its keys; found prompt, and `map` says which key is which");
  const Dataset d = load(true);
  EXPECT_EQ(d.train_examples->examples() + d.val_examples->examples(), 3);
  EXPECT_TRUE(d.notes.front().starts_with("4 bad lines are skipped; the first: " + name + ":2: ")) << d.notes.front();
  EXPECT_EQ(
      error_of(
          [&] { load_examples(write(good + "{\"prompt\": \"ab\", \"completion\": \"\"}\n"), kBytes, {.context = 8}); },
          Status::input),
      name + ":2: no token to train on: there is no response in it");
  EXPECT_EQ(error_of(
                [&] {
                  load_examples(write(good + "{\"prompt\": \"abcdefghi\", \"completion\": \"k\"}\n"), kBytes,
                                {.context = 8});
                },
                Status::input),
            name + ":2: no token to train on: the response begins behind the context of 8 tokens");
  EXPECT_TRUE(
      error_of([&] { load_examples(write(good + "{}\n"), kBytes, {.skip_bad = true, .context = 8}); }, Status::input)
          .starts_with(name + ": 1 examples to train on; expected at least 2"));
  EXPECT_TRUE(error_of([&] { load_examples(write(""), {.name = "char"}, {.context = 8}); }, Status::input)
                  .starts_with(name + ": 0 examples"));
}

TEST_F(LoadedExamples, LongOnesAreCutAndCounted) {
  const std::string line = "{\"prompt\": \"ab\", \"completion\": \"cdefghijkl\"}\n";
  const Dataset d = load_examples(write(line + line), kBytes, {.context = 6});
  EXPECT_EQ(d.train_examples->tokens(), 7);
  EXPECT_EQ(d.train_examples->targets(), 5);
  EXPECT_EQ(d.notes.front(), "2 examples are longer than the context and are cut after 7 tokens");
}

TEST_F(LoadedExamples, OfMoreRowsThanMemoryHoldsAreRefused) {
  const fs::path file = write(std::string(kGood) + kGood + kGood);
  const int64_t bytes = 3 * (std::ssize(std::string_view(kGood)) - 1);
  EXPECT_EQ(load_examples(file, kBytes, {.context = 8, .most_bytes = bytes}).train_examples->examples(), 2);
  for (const bool skip : {false, true})
    expect_error(Status::input, {"f.jsonl", "memory does not suffice", "`tessera data`"},
                 [&] { load_examples(file, kBytes, {.skip_bad = skip, .context = 8, .most_bytes = bytes - 1}); });
}

}  // namespace
}  // namespace tessera
