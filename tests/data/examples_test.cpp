// Examples for fine-tuning: the shapes of a line, the templates, and what is trained of them.
#include "data/examples.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "data/files.h"
#include "tensor/error.h"
#include "tensor/write_file.h"
#include "tests/support/errors.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::string refused(std::string_view line) {
  return error_of([&] { parse_example(line, "f:3"); }, Status::input);
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
  EXPECT_EQ(refused("{}"),
            "f:3: expected messages, prompt and completion, instruction and output, or text among its keys");
  EXPECT_EQ(refused(R"({"text": 3})"), "f:3: the key 'text' is a number; expected a string");
  EXPECT_EQ(refused(R"({"instruction": "Add."})"), "f:3: the key 'output' is missing");
  EXPECT_EQ(refused(R"({"messages": []})"), "f:3: the key 'messages' must be a list of messages that is not empty");
  EXPECT_EQ(refused(R"({"messages": [{"role": "tool", "content": ""}]})"),
            "f:3: message 1: the role 'tool'; expected system, user or assistant");
  EXPECT_EQ(refused(R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b",
"weight": 0}]})"),
            "f:3: message 2 has the key 'weight'; expected role and content alone");
  EXPECT_EQ(refused("[1]"), "f:3: expected an object");
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
            name + ":2: expected messages, prompt and completion, instruction and output, or text among its keys");
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

}  // namespace
}  // namespace tessera
