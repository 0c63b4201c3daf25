// Rows of JSON: shapes, keys, roles, flags, and the built-in templates.
#include "data/jsonl.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "data/jinja/template.h"
#include "data/json_rows.h"
#include "tests/data/support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

Example row(std::string_view line) { return parse_example(line, "f:1"); }

std::string refused(const Example& example, ChatTemplate style) {
  return error_message([&] { render(example, style, "f:1"); }, Status::input);
}
std::string refused(std::string_view line) {
  return error_message([&] { render(parse_example(line, "f:3"), ChatTemplate::automatic, "f:3"); }, Status::input);
}

TEST(Jsonl, ParsesFourRowFormats) {
  const Example chat =
      row(R"({"id": 7, "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé"}]})");
  EXPECT_EQ(chat.shape, Example::Shape::messages);
  ASSERT_EQ(chat.turns.size(), 2U);
  EXPECT_EQ(chat.turns[0].role, Role::system);
  EXPECT_EQ(chat.turns[1].text, "Hé");
  const Example completion = row(R"({"prompt": "1+1=", "completion": "2"})");
  EXPECT_EQ(completion.shape, Example::Shape::completion);
  EXPECT_EQ(completion.turns[1].text, "2");
  // Alpaca's own files have a text in addition.
  const Example instruction = row(R"({"instruction": "Add.", "input": "1 1", "output": "2", "text": "all of it"})");
  EXPECT_EQ(instruction.shape, Example::Shape::instruction);
  EXPECT_EQ(instruction.input, "1 1");
  EXPECT_EQ(row(R"({"instruction": "Add.", "output": "2"})").input, "");
  EXPECT_EQ(row(R"({"text": "once"})").shape, Example::Shape::text);
}

TEST(Jsonl, ErrorsNameTheLine) {
  constexpr const char* kAmong =
      "f:3: expected input_ids, messages, conversations, prompt and completion, instruction and output, or text among "
      "its keys";
  const std::pair<const char*, std::string> cases[] = {
      {"{}", kAmong},
      {R"({"question": "a", "answer": "b"})",
       std::string(kAmong) + "; got answer, question; `map` assigns other names to these keys"},
      {R"({"text": 3})", "f:3: the key 'text' is a number; expected a string"},
      {R"({"instruction": "Add."})", "f:3: the key 'output' is missing"},
      {R"({"instruction": "Add.", "output": null})", "f:3: the key 'output' is missing"},
      {R"({"messages": []})", "f:3: the key 'messages' must be a non-empty list of messages"},
      {R"({"messages": [{"role": "critic", "content": ""}]})",
       "f:3: message 1: the role 'critic'; expected system, user, assistant or tool, or one of these assigned "
       "by `roles`"},
      {R"({"messages": [{"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]}]})",
       "f:3: message 1 has the key 'tool_calls'; expected only role, content and weight"},
      {R"({"messages": [{"role": "user", "content": "a", "weight": 1}]})",
       "f:3: message 1: the key 'weight' is 1; expected 0, or 1 for an assistant"},
      {R"({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]})",
       "f:3: message 1: the key 'weight' is 0.5; expected 0, or 1 for an assistant"},
      {R"({"messages": [{"role": "assistant", "content": "a", "loss": 0.5}]})",
       "f:3: message 1: the key 'loss' is 0.5; expected false, or true for an assistant"},
      {R"({"messages": [{"role": "user", "content": "a", "masked": false}]})",
       "f:3: message 1: the key 'masked' is false; expected true, or false for an assistant"},
      {R"({"messages": [{"role": "assistant", "content": "a", "weight": 1, "train": false}]})",
       "f:3: message 1: the keys 'weight' and 'train' are contradictory"},
      {R"({"messages": [{"role": "assistant", "content": "a", "train_detail": [{"begin_offset": 0}]}]})",
       "f:3: message 1: the key 'train_detail' excludes part of a message; only complete messages can be excluded"},
      {R"({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]})",
       "f:3: message 1: a content part of type \"image_url\"; expected text"},
      {R"({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]})",
       "f:3: the key 'tools' would change the model's input; a row of messages does not support it"},
      {R"({"prompt": "a", "completion": "b", "chosen": "c"})",
       "f:3: the key 'chosen' would change the model's input; a row of prompt does not support it"},
      {R"({"prompt": [{"role": "user", "content": "a"}], "completion": "b"})",
       "f:3: the key 'completion' must be a non-empty list of messages"},
      {R"({"input_ids": [1, "2"]})", "f:3: the key 'input_ids' must be a list of integers"},
      {R"({"input_ids": [[1, 2]]})", "f:3: the key 'input_ids' must be a list of integers"},
      {R"({"input_ids": []})", "f:3: the key 'input_ids' is empty"},
      {R"({"input_ids": [1, 2], "labels": [1]})", "f:3: the key 'labels' has 1 elements; expected 2, as in input_ids"},
      {R"({"input_ids": [1, 2], "labels": [1, 3]})",
       "f:3: label 1 is 3, but its token is 2; expected this token or -100"},
      {R"({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]})",
       "f:3: the key 'attention_mask' masks tokens between others; expected only leading and trailing ones masked"},
      {R"({"input_ids": [1, 2], "attention_mask": [0, 0]})",
       "f:3: the key 'attention_mask' masks all tokens; expected at least one unmasked token"},
      {"[1]", "f:3: expected an object or a string"}};
  for (const auto& [row, why] : cases) EXPECT_EQ(refused(row), why) << row;
  EXPECT_TRUE(refused(R"({"text": "a", "text": "b"})").starts_with("f:3: the key 'text' is a duplicate"));
  EXPECT_TRUE(refused(R"({"text": "a)").starts_with("f:3: not valid JSON at byte"));
  EXPECT_TRUE(refused("{\"text\": \"\xff\"}").starts_with("f:3: not valid JSON at byte"));
}

TEST(Jsonl, ParsesRoleNames) {
  const char* const line =
      R"({"messages": [{"role": "developer", "content": "s"}, {"role": "bot", "content": "b", "name": "n"}]})";
  const Example own = row(line);
  EXPECT_EQ(own.turns[0].more, R"({"role":"developer"})") << "a model's own template renders it";
  EXPECT_TRUE(refused(own, ChatTemplate::chatml).starts_with("f:1: message 1: the role 'developer'; expected system"));
  const Example mapped = parse_example(line, "f:1", {{}, parse_role_names("developer=system,assistant=bot")});
  EXPECT_EQ(mapped.turns[0].role, Role::system);
  EXPECT_TRUE(mapped.turns[1].is_response());
  EXPECT_EQ(mapped.turns[0].more, "");
  EXPECT_EQ(parse_role_names("user=assistant").at("assistant"), Role::user) << "as with `map`";
  for (const char* bad : {"a=b", "user", "user=", "bot=user,bot=tool"})
    EXPECT_TRUE(error_message([&] { parse_role_names(bad); }).starts_with("`roles`: expected unique names")) << bad;
}

TEST(Jsonl, LineNumbersCountBlankLines) {
  std::vector<std::string> found;
  for_each_line("\uFEFFa\r\n\n  \nb\n\nc", "f", [&](std::string_view line, int64_t number) {
    found.push_back(std::to_string(number) + std::string(line));
  });
  EXPECT_EQ(found, (std::vector<std::string>{"1a\r", "4b", "6c"}));
}

// The rendered text, with the response in brackets and * for the end.
std::string shown(const Example& example, ChatTemplate style) {
  std::string out;
  bool within = false;
  for (const Segment& segment : render(example, style, "f:1")) {
    if (segment.response != within) out += within ? "]" : "[";
    within = segment.response;
    out += segment.kind == Segment::Kind::end ? "*" : segment.text;
  }
  return out + (within ? "]" : "");
}

TEST(ChatTemplates, MatchPublishedTemplates) {
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
  EXPECT_EQ(refused(chat, ChatTemplate::none), "f:1: messages require `template` chatml, llama3 or alpaca");

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

// Rows as written by OpenAI, ShareGPT, TRL and Alpaca's successors, in ChatML without the names of its markers.
TEST(Jsonl, ParsesRowFormatsOfOtherPrograms) {
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
  for (const auto& [line, expected] : cases) {
    std::string found;
    for (const Segment& p : render(row(line), ChatTemplate::chatml, "f:1"))
      if (p.kind == Segment::Kind::text && p.text != "\n")
        found += p.never ? "{" + p.text + "}" : p.response ? "[" + p.text + "]" : p.text;
      else if (p.text == "<|im_start|>" && !found.empty())
        found += ";";
    EXPECT_EQ(found, expected) << line;
  }
  EXPECT_EQ(row(R"({"text": "a", "id": 7, "meta": {"x": 1}, "source": null})").unread,
            (std::set<std::string>{"'id'", "'meta'"}));
  EXPECT_EQ(row(R"({"messages": [{"role": "user", "content": "a", "name": "Ann"}]})").unread,
            std::set<std::string>{"'name' of messages"});
  EXPECT_EQ(row(R"({"messages": [{"role": "user", "content": "a", "done": false, "x": ""}], "ok": false})").unread,
            (std::set<std::string>{"'done' of messages", "'ok'"}));
  EXPECT_EQ(shown(row(R"("once")"), ChatTemplate::automatic), "[once*]");
  const Example tokens = row(
      R"({"input_ids": [9, 9, 5, 6, 7, 0], "labels": [-100, 9, -100, 6, 7, 0], "attention_mask": [0, 0, 1, 1, 1, 0]})");
  EXPECT_EQ(tokens.tokens, (std::vector<int32_t>{5, 6, 7}));
  EXPECT_EQ(tokens.trained, (std::vector<bool>{false, true, true}));
  EXPECT_EQ(refused(row(R"({"prompt": "a", "completion": "b", "system": "s"})"), ChatTemplate::none),
            "f:1: the key 'system' requires `template` chatml, llama3 or alpaca");
  EXPECT_EQ(refused(row(R"({"messages": [{"role": "tool", "content": "t"}]})"), ChatTemplate::alpaca),
            "f:1: `template` alpaca does not support the role tool; use chatml or llama3");
}

TEST(Jsonl, FlagsExcludeMessagesFromLoss) {
  for (const char* flag :
       {R"("weight": 0)", R"("weight": false)", R"("loss_weight": 0.0)", R"("loss_scale": 0)", R"("train": false)",
        R"("training": false)", R"("trainable": 0)", R"("loss": false)", R"("learn": false)", R"("mask": true)",
        R"("masked": 1)", R"("ignore": true)", R"("ignore_loss": true, "train": false)"}) {
    const Example example = row(fmt::format(R"({{"conversations": [{{"from": "gpt", "value": "a", {0}}},
        {{"from": "human", "value": "b", {0}}}, {{"from": "gpt", "value": "c"}}]}})",
                                            flag));
    EXPECT_EQ(example.turns[0].training, Message::Training::never) << flag;
    EXPECT_EQ(example.turns[2].training, Message::Training::by_role) << flag;
    EXPECT_EQ(example.turns[0].more + example.unshown, "") << flag;
    EXPECT_TRUE(example.unread.empty()) << flag;
  }
  for (const char* flag : {R"("weight": 1)", R"("loss": true)", R"("train": null)", R"("masked": false)"})
    EXPECT_TRUE(row(fmt::format(R"({{"messages": [{{"role": "assistant", "content": "a", {}}}]}})", flag))
                    .turns[0]
                    .is_response())
        << flag;
}

TEST(Jsonl, RejectsKeysSimilarToFlags) {
  const auto message = [](const char* flag, const char* role = "assistant") {
    return fmt::format(R"({{"messages": [{{"role": "{}", "content": "a", {}}}]}})", role, flag);
  };
  for (const char* flag : {R"("is_train": false)", R"("compute_loss": 0)", R"("is_masked": true)", R"("skip": 1)"})
    expect_error(Status::input, {"f:1: message 1: the key '", "excludes a message from the loss; expected weight"},
                 [&] { row(message(flag)); });
  for (const char* flag : {R"("is_train": true)", R"("skip": false)", R"("label": 0)", R"("train_id": "x")"})
    EXPECT_TRUE(row(message(flag)).turns[0].is_response()) << flag;
  EXPECT_FALSE(row(message(R"("is_train": false)", "user")).turns[0].is_response());
}

TEST(Jsonl, RenamesKeys) {
  const RowNames names{parse_key_names("prompt=question,completion=answer,system=sys")};
  const Example example = parse_example(R"({"question": "a", "answer": "b", "prompt": "old", "id": 1})", "f:1", names);
  EXPECT_EQ(shown(example, ChatTemplate::none), "a[b*]");
  EXPECT_EQ(example.unread, std::set<std::string>{"'id'"});
  EXPECT_EQ(example.mapped, (std::set<std::string>{"answer", "question"})) << "a missing key is null";
  // Names may be swapped.
  EXPECT_EQ(shown(parse_example(R"({"prompt": "b", "completion": "a"})", "f:1",
                                {parse_key_names("prompt=completion,completion=prompt")}),
                  ChatTemplate::none),
            "a[b*]");
  EXPECT_EQ(error_message([&] { parse_example(R"({"question": "a"})", "f:1", names); }, Status::input),
            "f:1: the key 'answer', named in `map`, is missing");
  for (const char* bad : {"prompt", "prompt=", "question=prompt", "prompt=a,prompt=b", "=a"})
    EXPECT_TRUE(error_message([&] { parse_key_names(bad); }).starts_with("`map`: expected each of input_ids, ")) << bad;
  EXPECT_EQ(parse_key_names("text=a=b").at(0).second, "a=b");
}

// The exported Jinja template renders the same text as the built-in one.
TEST(ChatTemplates, ExportedTemplatesRenderIdentically) {
  nlohmann::json tokenizer = chat_tokenizer();
  for (nlohmann::json& token : tokenizer["added_tokens"])
    if (token["id"] == 400) token["content"] = "<|begin_of_text|>";
  const Example conversation =
      row(R"({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": " a"},
      {"role": "assistant", "content": "b "}, {"role": "user", "content": "c"}]})");
  for (const ChatTemplate style : {ChatTemplate::chatml, ChatTemplate::llama3}) {
    const nlohmann::json config{{"chat_template", jinja_source(style)}, {"bos_token", "<|begin_of_text|>"}};
    const ModelTemplate own(
        HubTokenizer({{"tokenizer.json", tokenizer.dump()}, {"tokenizer_config.json", config.dump()}}, "t/"));
    const auto to_string = [](const std::vector<Segment>& segments) {
      std::string out;
      for (const Segment& segment : segments) out += segment.text;
      return out;
    };
    EXPECT_EQ(to_string(own.render(conversation, "f:1")), to_string(render(conversation, style, "f:1")));
  }
  EXPECT_EQ(jinja_source(ChatTemplate::alpaca), "");
}

}  // namespace
}  // namespace tessera
