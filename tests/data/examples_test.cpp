// Examples for fine-tuning: tokens and targets.
#include "data/examples.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <numeric>
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

const TokenizerChoice kBytes{.name = "bytes"};
std::string pair(const std::string& prompt, const std::string& completion) {
  return fmt::format(R"({{"prompt": "{}", "completion": "{}"}})", prompt, completion) + "\n";
}
const std::string kGood = pair("ab", "cd");

// In the order of the rows.
std::vector<int32_t> target_tokens(const Rows& rows) {
  std::vector<int32_t> inputs(static_cast<size_t>(rows.count() * rows.context())), targets(inputs.size());
  rows.load(0, rows.count(), inputs.data(), targets.data());
  std::erase(targets, Rows::kIgnored);
  return targets;
}

class LoadedExamples : public DataTest {
 protected:
  fs::path write(const std::string& text) const { return file("f.jsonl", text); }
  // The error for a file with this text.
  std::string refusal(const std::string& text, const TokenizerChoice& choice = kBytes, bool skip = false) const {
    return error_message([&] { load_examples(write(text), choice, {.skip_bad = skip, .context = 8}); }, Status::input);
  }
};

TEST_F(LoadedExamples, EncodePromptAndResponse) {
  const Dataset d = load_examples(write(kGood + kGood + kGood), kBytes, {.context = 8});
  EXPECT_EQ(d.train_examples->examples(), 2);
  EXPECT_EQ(d.val_examples->examples(), 1);
  EXPECT_EQ(d.train_examples->targets(), 4);
  EXPECT_EQ(d.val_bytes, 2);
  EXPECT_NEAR(d.bits_per_byte(std::log(2.0)), 1, 1e-12);  // bytes of the targets, "cd"; the prompt has no loss
  EXPECT_EQ(d.prompt(), (std::vector<int32_t>{'a', 'b'}));
  EXPECT_EQ(d.notes,
            std::vector<std::string>{"the tokenizer has no end-of-text token: a model cannot learn where to stop"});
  ExampleOptions all{.responses_only = false, .context = 8};
  EXPECT_EQ(load_examples(write(kGood + kGood), kBytes, all).train_examples->targets(), 3);
  const Dataset chat =
      load_examples(write("{\"instruction\": \"a\", \"output\": \"b\"}\n{\"instruction\": \"a\", \"output\": \"c\"}\n"),
                    {.name = "char"}, {.style = ChatTemplate::chatml, .context = 200});
  EXPECT_EQ(
      chat.notes,
      std::vector<std::string>{
          "the tokenizer has no <|im_end|>, <|im_start|>; it is encoded as text, which messages may also contain"});
  EXPECT_EQ(chat.tokenizer->decode(chat.prompt()), "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(chat.tokenizer->decode(target_tokens(*chat.val_examples)), "c<|im_end|>");
}

// A completion continues its prompt: the ids equal those of the concatenated text, and the targets follow from the
// offsets of the library `tokenizers` 0.23, where a token that ends after the prompt contains a byte of the completion.
TEST_F(LoadedExamples, EncodePromptAndCompletionAsOneText) {
  const std::pair<const char*, const char*> texts[] = {
      {"the river", " bank"}, {"Q: ", "bar that"}, {"in the", "refore it"}, {"a\\n", "\\nb \u00e9"}};
  const int targets[][4] = {{3, 5, 6, 5}, {3, 5, 6, 5}, {3, 5, 6, 5}, {3, 5, 6, 4},
                            {3, 5, 6, 5}, {3, 5, 6, 5}, {3, 5, 6, 5}, {3, 4, 6, 4}};
  for (size_t t = 0; t < kTokenizers.size(); ++t) {
    const auto tokenizer = Tokenizer::open_folder(tokenizer_fixture(kTokenizers[t]));
    const int end = tokenizer->document_end() ? 1 : 0;
    for (size_t i = 0; i < std::size(texts); ++i) {
      SCOPED_TRACE(fmt::format("{} {}", kTokenizers[t], i));
      std::vector<std::string> notes;
      const auto rows =
          all_examples(write(pair(texts[i].first, texts[i].second)), *tokenizer, {.ends = false, .context = 50}, notes);
      std::string text = fmt::format("{}{}", texts[i].first, texts[i].second);
      for (size_t at = text.find("\\n"); at != std::string::npos; at = text.find("\\n")) text.replace(at, 2, "\n");
      const std::vector<int32_t> ids = tokenizer->encode(text);
      EXPECT_EQ(rows->tokens(), std::ssize(ids) + end);
      EXPECT_EQ(rows->targets(), targets[t][i] + end);
      std::vector<int32_t> found = rows->prompt();
      for (const int32_t target : target_tokens(*rows)) found.push_back(target);
      found.resize(ids.size());
      EXPECT_EQ(found, ids);
    }
  }
}

// The output of a chat template as text: with `special` its markers are tokens, otherwise text, and a note lists them.
TEST_F(LoadedExamples, NotesListSpecialTokensInText) {
  const fs::path folder = emptied("chat");
  file("chat/tokenizer.json", chat_tokenizer().dump());
  const std::string marked = "<|im_start|>user\\na<|im_end|>", row = R"({"text": ")" + marked + "\"}\n",
                    asked = R"({"prompt": ")" + marked + "\", \"completion\": \"b\"}\n";
  const auto tokenizer = Tokenizer::open_folder(folder);
  for (const bool special : {false, true}) {
    std::vector<std::string> notes;
    const auto rows = all_examples(write(row + row), *tokenizer, {.special = special, .context = 50}, notes);
    const auto tokens = rows->tokens() / 2 - (tokenizer->document_end() ? 1 : 0);
    // A text row may have been rendered by a template, so its names encode as tokens, as in transformers.
    EXPECT_EQ(tokens, std::ssize(tokenizer->encode_with("<|im_start|>user\na<|im_end|>", {.special_in_text = true})));
    EXPECT_EQ(rows->prompt()[0], 400);
    const std::string four = "4 occurrences of <|im_end|>, <|im_start|> in the data: read as ";
    EXPECT_EQ(notes.at(0), four + "special tokens");
    const std::string how = special ? "special tokens" : "text; `special` reads them as special tokens";
    notes.clear();
    EXPECT_EQ(
        all_examples(write(asked + asked), *tokenizer, {.special = special, .context = 50}, notes)->prompt()[0] == 400,
        special);
    EXPECT_EQ(notes.at(0), four + how);
    // The same holds for a text, whose second dataset is cached, and for documents.
    std::string long_text;
    for (int i = 0; i < 20; ++i) long_text += "<|im_end|> a b\n";
    const TokenizerChoice choice{.name = folder.string(), .special = special};
    for (int turn = 0; turn < 2; ++turn) {
      const Dataset d = dataset_for(file("t.txt", long_text).string(), choice);
      EXPECT_EQ(d.notes, std::vector<std::string>{"20 occurrences of <|im_end|> in the data: read as " + how});
      EXPECT_EQ(d.train.at(0)[0] == 401, special);
    }
    EXPECT_EQ(dataset_of_documents(write(row + row), choice).notes.at(0), four + how);
  }
  expect_error(Status::usage, {"`special`: expected text or examples, got tokens"}, [&] {
    dataset_for(
        make_dataset(load_text_file(file("t.txt", "one text and two")), kBytes, path("made")).directory.string(),
        {.name = "bytes", .special = true});
  });
}

// Formats in which people, git, editors and compressors store one file: the same rows under any name.
TEST_F(LoadedExamples, AreIdenticalForEveryFileFormat) {
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
    const fs::path written = file(name, bytes);
    EXPECT_TRUE(holds_examples(written)) << name << bytes;
    std::vector<std::string> notes;
    const auto rows = all_examples(written, ByteTokenizer(), {.context = 20}, notes);
    EXPECT_EQ(rows->examples(), 2) << name << bytes;
    EXPECT_EQ(ByteTokenizer().decode(target_tokens(*rows)), "c[,]\"}\\df") << name << bytes;
  }
  for (const char* text : {"{ int x; }\n", "[1] A. Author, a book.\n", ""})
    EXPECT_FALSE(holds_examples(file("b.txt", text))) << text;
  EXPECT_TRUE(holds_examples(file("b.jsonl", "nonsense"))) << "the error names its line";
  EXPECT_TRUE(holds_examples(file("b.ndjson", "")));
  const auto refusal = [&](const std::string& bytes) {
    return error_message([&] { for_each_line(bytes, "f", [](std::string_view, int64_t) {}); }, Status::input);
  };
  EXPECT_EQ(refusal("[\n{\"text\": \"a\"},\n{\"text\": \"b\""), "f:3: the list of rows is not closed after this line");
  EXPECT_EQ(refusal("[{\"text\": \"a\"}]\n{\"text\": \"b\"}"), "f:2: unexpected content after the list of rows");
}

TEST_F(LoadedExamples, AcceptTokenizedRows) {
  const std::string rows = "{\"input_ids\": [97, 98, 99], \"labels\": [-100, -100, 99]}\n{\"input_ids\": [97, 98]}\n";
  for (const bool responses : {true, false}) {
    const Dataset d = load_examples(write(rows), kBytes, {.responses_only = responses, .context = 8});
    EXPECT_EQ(target_tokens(*d.train_examples), std::vector<int32_t>{'c'});
    EXPECT_EQ(target_tokens(*d.val_examples), std::vector<int32_t>{'b'});
  }
  EXPECT_TRUE(refusal(rows, {.name = "char"})
                  .ends_with("f.jsonl:1: the key 'input_ids' requires `tokenizer`: the directory of the tokenizer that "
                             "produced them"));
  const fs::path far = write("{\"input_ids\": [97, 300]}\n");
  std::vector<std::string> notes;
  for (const auto& [vocab, message] :
       {std::pair<int64_t, std::string>{0, " is outside the tokenizer's vocabulary of 256"},
        {98, " is outside the model's embedding table of 98 rows"}})
    expect_error(Status::input, {":1: token 300" + message},
                 [&, size = vocab] { all_examples(far, ByteTokenizer(), {.context = 8, .vocab = size}, notes); });
}

// The targets of a conversation in brackets, with the cases in which they apply: r, responses only; a, all; R and A,
// the same with a weight of 0 for the first answer and the second question. The first token is not a target, because
// nothing predicts it.
TEST_F(LoadedExamples, TargetsMatchEachChatTemplate) {
  auto described = nlohmann::json::parse(read_file(TESSERA_SOURCE_DIR "/tests/app/fixtures/bos/tokenizer.json"));
  for (const char* marker :
       {"<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}) {
    described["added_tokens"].push_back(described["added_tokens"][0]);
    described["added_tokens"].back().update({{"id", 397 + described["added_tokens"].size()}, {"content", marker}});
  }
  const HubTokenizer tokenizer(
      {{"tokenizer.json", described.dump()}, {"tokenizer_config.json", R"({"eos_token": "</s>"})"}}, "t/");
  const auto marked = [&](ChatTemplate style, std::string_view row) {
    std::string text, out, open;
    std::vector<std::string> cases;  // of each byte
    for (const char one : {'r', 'a', 'R', 'A'}) {
      std::vector<std::string> notes;
      const std::string line = fmt::format(fmt::runtime(row), one < 'a' ? R"(, "weight": 0)" : "");
      const auto rows = all_examples(
          write(line), tokenizer, {.style = style, .responses_only = one == 'r' || one == 'R', .context = 300}, notes);
      EXPECT_TRUE(notes.empty()) << notes.front();  // the markers are tokens
      std::vector<int32_t> in(300), next(300);
      rows->load(0, 1, in.data(), next.data());
      size_t at = 0;
      const auto add = [&](int32_t token, bool target) {
        for (const char byte : tokenizer.token_bytes(token)) {
          if (at == text.size()) text += byte, cases.emplace_back();
          EXPECT_EQ(text[at], byte);
          cases[at++] += target ? std::string(1, one) : "";
        }
      };
      add(in[0], false);
      for (size_t t = 1, end = static_cast<size_t>(rows->tokens()); t < end; ++t)
        if (const bool target = next[t - 1] != Rows::kIgnored; target || t + 1 < end)  // otherwise outside the row
          add(target ? next[t - 1] : in[t], target);
    }
    for (size_t i = 0; i < text.size(); ++i) {
      if (cases[i] != open) out += (open.empty() ? "" : "]") + (cases[i].empty() ? "" : "[" + cases[i] + ":");
      open = cases[i];
      out += text[i];
    }
    return out + (open.empty() ? "" : "]");
  };
  const std::string_view conversation =
      R"({{"messages": [{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": "b"{0}}}, )"
      R"({{"role": "user", "content": "c"{0}}}, {{"role": "assistant", "content": "d"}}]}})";
  EXPECT_EQ(marked(ChatTemplate::chatml, conversation),
            "<|im_start|>[aA:user\na<|im_end|>\n<|im_start|>assistant\n][ra:b<|im_end|>][aA:\n<|im_start|>user\n]"
            "[a:c<|im_end|>][aA:\n<|im_start|>assistant\n][raRA:d<|im_end|>][aA:\n]");
  EXPECT_EQ(marked(ChatTemplate::llama3, conversation),
            "<|begin_of_text|>[aA:<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n][ra:b<|eot_id|>]"
            "[aA:<|start_header_id|>user<|end_header_id|>\n\n][a:c<|eot_id|>]"
            "[aA:<|start_header_id|>assistant<|end_header_id|>\n\n][raRA:d<|eot_id|>]");
  EXPECT_EQ(marked(ChatTemplate::alpaca, conversation),
            "<s>[aA:Below is an instruction that describes a task. Write a response that appropriately completes the "
            "request.\n\n### Instruction:\na\n\n### Response:\n][ra:b</s>][aA:\n\n### Instruction:\n][a:c]"
            "[aA:\n\n### Response:\n][raRA:d</s>]");
  EXPECT_EQ(marked(ChatTemplate::none, R"({{"prompt": "a", "completion": "b"}})"), "<s>[aA:a][raRA:b</s>]");
}

// Tokens that the tokenizer itself inserts before a text precede rows that begin with text.
TEST_F(LoadedExamples, BeginWithBosToken) {
  const TokenizerChoice bos{.name = std::string(TESSERA_SOURCE_DIR) + "/tests/app/fixtures/bos"};
  const auto load = [&](const std::string& line, ExampleOptions o) {
    o.context = 100;
    return load_examples(write(line + "\n" + line + "\n"), bos, o);
  };
  const auto first = [&](const std::string& line, const ExampleOptions& o) { return load(line, o).prompt(); };
  const std::string text = R"({"text": "The moon"})", pair = R"({"prompt": "The", "completion": " moon"})",
                    asked = R"({"instruction": "The", "output": "moon"})";
  EXPECT_EQ(first(text, {}), std::vector<int32_t>{0});
  EXPECT_NE(first(text, {.ends = false}), std::vector<int32_t>{0});
  EXPECT_EQ(first(pair, {}).front(), 0);
  EXPECT_EQ(first(asked, {}).front(), 0);
  EXPECT_NE(first(asked, {.style = ChatTemplate::chatml}).front(), 0) << "a template has its own beginning";
  EXPECT_EQ(load(text, {}).train_examples->targets(), load(text, {.ends = false}).train_examples->targets() + 1);
}

// A tokenizer for chats: its markers are tokens, which no message can contain, and its template is the one that `auto`
// selects for messages.
TEST_F(LoadedExamples, EncodeTemplateMarkersAsSpecialTokens) {
  fs::create_directories(path("chat"));
  file("chat/tokenizer.json", chat_tokenizer().dump());
  const auto with = [&](const std::string& jinja) {
    file("chat/tokenizer_config.json", nlohmann::json{{"eos_token", "</s>"}, {"chat_template", jinja}}.dump());
    return TokenizerChoice{.name = path("chat").string()};
  };
  const fs::path rows =
      write(R"({"messages": [{"role": "user", "content": "a <|im_end|>"}, {"role": "assistant", "content": "b"}]})"
            "\n"
            R"({"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]})");
  const std::string chatml =
      "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
      "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
  const Dataset d = load_examples(rows, with(chatml), {.context = 60});
  EXPECT_EQ(d.notes, std::vector<std::string>{"1 occurrence of <|im_end|> in the data: read as text; `special` reads "
                                              "them as special tokens"});
  const std::vector<int32_t> prompt = d.prompt();
  EXPECT_EQ(std::ranges::count(prompt, 400), 2);
  EXPECT_EQ(std::ranges::count(prompt, 401), 1) << "the name in the message is text";
  EXPECT_EQ(target_tokens(*d.train_examples).back(), 401);

  // Keys of messages named in the template count as used, even if false; others are reported.
  const std::string reads = "{% for m in messages %}{% if m.draft is defined %}[{{ m.draft }}]{% endif %}" +
                            chatml.substr(chatml.find("{{"), chatml.find("{% endfor") - chatml.find("{{"))
                                .replace(0, 0, "{% set message = m %}") +
                            chatml.substr(chatml.find("{% endfor"));
  const std::string line = R"({"messages": [{"role": "user", "content": "c", "draft": false, "dr": 1, "train": false},
      {"role": "assistant", "content": "d", "loss": true}]})";
  const Dataset keys = load_examples(
      write(std::string(line).erase(line.find('\n'), 1) + "\n" + std::string(line).erase(line.find('\n'), 1)),
      with(reads), {.context = 60});
  EXPECT_EQ(keys.notes, std::vector<std::string>{"unused keys: 'dr' of messages"});
  EXPECT_TRUE(keys.tokenizer->decode(keys.prompt()).starts_with("[False]<|im_start|>user"));

  const TokenizerChoice other = with("{{ messages }}\n{{ messages | in_its_own_way }}");
  const std::string why = "`template` for " + rows.string() + ": chat_template:2: unknown filter 'in_its_own_way'";
  expect_error(Status::usage, {why}, [&] { load_examples(rows, other, {.skip_bad = true, .context = 60}); });
  EXPECT_NO_THROW(load_examples(rows, other, {.style = ChatTemplate::chatml, .context = 60}));
  EXPECT_NO_THROW(load_examples(write(kGood + kGood), other, {.context = 60})) << "no messages";
}

TEST_F(LoadedExamples, RejectOrSkipInvalidLines) {
  const std::string rows =
      kGood + "{\"prompt\": \"ab\"}\n" + kGood + "nonsense\n" + pair("ab", "") + pair("abcdefghij", "k") + kGood;
  const std::string name = path("f.jsonl").string();
  EXPECT_EQ(refusal(rows),
            name +
                ":2: expected input_ids, messages, conversations, prompt and completion, instruction and output, or "
                "text among its keys; got prompt; `map` assigns other names to these keys");
  const Dataset d = load_examples(write(rows), kBytes, {.skip_bad = true, .context = 8});
  EXPECT_EQ(d.train_examples->examples() + d.val_examples->examples(), 3);
  EXPECT_TRUE(d.notes.front().starts_with("4 bad lines are skipped; the first: " + name + ":2: ")) << d.notes.front();
  EXPECT_EQ(refusal(kGood + pair("ab", "")), name + ":2: no token to train on: it has no response");
  EXPECT_EQ(refusal(kGood + pair("abcdefghi", "k")),
            name + ":2: no token to train on: the response begins after the context of 8 tokens");
  EXPECT_TRUE(refusal(kGood + "{}\n", kBytes, true).starts_with(name + ": 1 training examples; expected at least 2"));
  EXPECT_TRUE(refusal("", {.name = "char"}).starts_with(name + ": 0 training examples"));
}

// Like TRL, adds no end token to a text that already ends with the name of this token.
TEST_F(LoadedExamples, AppendNoSecondEosToken) {
  emptied("ends");
  file("ends/tokenizer.json", chat_tokenizer().dump());
  file("ends/tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
  const auto tokenizer = Tokenizer::open_folder(path("ends"));
  const auto tokens = [&](const std::string& text, bool special = false) {
    std::vector<std::string> notes;
    return all_examples(write(text + "\n" + text), *tokenizer, {.special = special, .context = 50}, notes)->tokens() /
           2;
  };
  const auto count = [&](const std::string& text) { return std::ssize(tokenizer->encode(text)); };
  EXPECT_EQ(tokens(R"({"text": "a b"})"), count("a b") + 1);
  EXPECT_EQ(tokens(R"({"text": "a b<|im_end|>"})"), count("a b") + 1);
  EXPECT_EQ(tokens(pair("a", " b<|im_end|>"), true), count("a b") + 1);
  EXPECT_EQ(tokens(pair("a", " b<|im_end|>")), count("a b<|im_end|>") + 1);
}

// The tokens are as if the template's text were tokenized with its markers (Phi-4's have both lstrip and rstrip).
TEST_F(LoadedExamples, MarkersStripWhitespaceLikeSpecialTokens) {
  const std::string conversation =
      R"({"messages": [{"role": "user", "content": "a "}, {"role": "assistant", "content": ""}]})";
  const std::string text = "<|im_start|>user\na <|im_end|>\n<|im_start|>assistant\n<|im_end|>\n";
  for (const auto& [left, right] : {std::pair(true, true), {true, false}, {false, true}, {false, false}}) {
    nlohmann::json described = chat_tokenizer();
    for (nlohmann::json& token : described["added_tokens"]) token["lstrip"] = left, token["rstrip"] = right;
    emptied("absorbs");
    file("absorbs/tokenizer.json", described.dump());
    const auto tokenizer = Tokenizer::open_folder(path("absorbs"));
    std::vector<std::string> notes;
    const auto rows =
        all_examples(write(conversation), *tokenizer, {.style = ChatTemplate::chatml, .context = 50}, notes);
    EXPECT_EQ(rows->tokens(), std::ssize(tokenizer->encode_with(text, {.special_in_text = true}))) << left << right;
  }
}

TEST_F(LoadedExamples, ErrorsExplainConversationsWithoutResponses) {
  emptied("own");
  file("own/tokenizer.json", chat_tokenizer().dump());
  file("own/chat_template.jinja", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}");
  const std::string conversation =
      R"({"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]})"
      "\n";
  EXPECT_TRUE(refusal(conversation + conversation, {.name = path("own").string()})
                  .ends_with("it has no response; `roles` bot=assistant trains on messages of this role"));
}

TEST_F(LoadedExamples, NotesListUnusedKeysAndTruncation) {
  const std::string keys = "{\"prompt\": \"ab\", \"completion\": \"cd\", \"id\": 1}\n", line = pair("ab", "cdefghijkl");
  EXPECT_EQ(load_examples(write(keys + keys), kBytes, {.context = 8}).notes.front(), "unused keys: 'id'");
  const Dataset d = load_examples(write(line + line), kBytes, {.context = 6});
  EXPECT_EQ(d.train_examples->tokens(), 7);
  EXPECT_EQ(d.train_examples->targets(), 5);
  EXPECT_EQ(d.notes.front(), "2 examples exceed the context and are truncated to 7 tokens");
}

// Special tokens, markers and truncated text count 0 bytes, for every tokenizer and template.
TEST_F(LoadedExamples, CountOnlyTextBytesOfResponses) {
  const std::string conversation =
      R"({"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "the cat é"}]})"
      "\n";
  fs::create_directory(path("chat"));
  write_file(path("chat/tokenizer.json"), chat_tokenizer().dump());
  const TokenizerChoice chat{.name = path("chat").string()};
  for (const TokenizerChoice& choice : {kBytes, chat})
    for (const ChatTemplate style : {ChatTemplate::chatml, ChatTemplate::llama3, ChatTemplate::alpaca}) {
      const Dataset d =
          load_examples(write(conversation + conversation + conversation), choice, {.style = style, .context = 400});
      EXPECT_EQ(d.train_bytes, 20);
      EXPECT_EQ(d.val_bytes, 10);
      const ExampleOptions all{.style = style, .responses_only = false, .context = 400};
      EXPECT_EQ(load_examples(write(conversation + conversation), choice, all).val_bytes, 12);
    }
  // Truncation removes 8 bytes of the last marker, which count in proportion: 64/72 of 12 bytes.
  EXPECT_EQ(load_examples(write(conversation + conversation), kBytes,
                          {.style = ChatTemplate::chatml, .responses_only = false, .context = 64})
                .val_bytes,
            10);
  const std::string asked = R"({"instruction": "do", "input": "it", "output": "ok"})"
                            "\n";
  EXPECT_EQ(load_examples(write(asked + asked), chat, {.responses_only = false, .context = 400}).val_bytes, 6);
  file("chat/chat_template.jinja", "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}");
  EXPECT_EQ(
      load_examples(write(conversation + conversation), chat, {.responses_only = false, .context = 400}).val_bytes, 12);
  fs::remove(path("chat/chat_template.jinja"));
  EXPECT_EQ(load_examples(write(kGood + pair("ab", "cdefghijkl")), kBytes, {.context = 6}).val_bytes, 5);
  const std::string made = "{\"input_ids\": [401, 260, 261, 401]}\n";
  const std::shared_ptr<Tokenizer> tokenizer = make_tokenizer(chat, "f");
  EXPECT_EQ(load_examples(write(made + made), chat, {.context = 6}).train_bytes,
            std::ssize(tokenizer->token_bytes(260) + tokenizer->token_bytes(261)));
  const TokenFile tokens =
      TokenFile::from_tokens(std::vector<int32_t>{401, 260, 261, 400}, tokenizer->vocab_size(), "f");
  EXPECT_EQ(token_bytes(tokens, 0, 4, *tokenizer),
            std::ssize(tokenizer->token_bytes(260) + tokenizer->token_bytes(261)));
}

TEST_F(LoadedExamples, RejectRowsBeyondMemoryLimit) {
  const fs::path file = write(std::string(kGood) + kGood + kGood);
  const int64_t bytes = 3 * (std::ssize(std::string_view(kGood)) - 1);
  EXPECT_EQ(load_examples(file, kBytes, {.context = 8, .max_bytes = bytes}).train_examples->examples(), 2);
  for (const bool skip : {false, true})
    expect_error(Status::input, {"f.jsonl", "do not fit in memory", "`tessera data`"},
                 [&] { load_examples(file, kBytes, {.skip_bad = skip, .context = 8, .max_bytes = bytes - 1}); });
}

// --- placement of examples in rows, and the order of training ---

EncodedExample make_example(int32_t first, int64_t prompt, int64_t response) {
  EncodedExample out{std::vector<int32_t>(static_cast<size_t>(prompt + response)),
                     std::vector<bool>(static_cast<size_t>(prompt), false)};
  std::iota(out.tokens.begin(), out.tokens.end(), first);
  out.trained.resize(out.tokens.size(), true);
  return out;
}

TEST(ExampleRows, TargetsExcludePromptsAndPadding) {
  const ExampleRows rows({make_example(10, 2, 2), make_example(20, 0, 2)}, 5, false);
  std::vector<int32_t> in(10), out(10);
  rows.load(0, 2, in.data(), out.data());
  EXPECT_EQ(in, (std::vector<int32_t>{10, 11, 12, 0, 0, 20, 0, 0, 0, 0}));
  EXPECT_EQ(out, (std::vector<int32_t>{-1, 12, 13, -1, -1, 21, -1, -1, -1, -1}));
  EXPECT_EQ(rows.targets(), 3);
  EXPECT_EQ(rows.count_targets(0), 2);
  EXPECT_EQ(rows.prompt(), (std::vector<int32_t>{10, 11}));
  EXPECT_EQ(target_tokens(rows), (std::vector<int32_t>{12, 13, 21}));
  EXPECT_THROW(rows.load(1, 2, in.data(), out.data()), Error);
  EXPECT_THROW(ExampleRows({make_example(0, 2, 5)}, 5, false), Error);  // too long
  EXPECT_THROW(ExampleRows({make_example(0, 3, 0)}, 5, false), Error);  // without a target
}

// Every target occurs once, with the same preceding tokens as in isolation and the beginning of its document.
TEST(ExampleRows, PackingIsolatesEachExample) {
  std::vector<EncodedExample> examples;
  const Philox random = Philox::named(1, "packing");
  for (uint64_t e = 0; e < 50; ++e)
    examples.push_back(make_example(static_cast<int32_t>(100 * e), static_cast<int64_t>(random.below(5, e)),
                                    2 + static_cast<int64_t>(random.below(7, e, 1))));
  const ExampleRows rows(examples, 16, true);
  EXPECT_LT(rows.count(), 25);
  int64_t targets = 0, positions = 0;
  std::set<int32_t> seen;
  for (int64_t r = 0; r < rows.count(); ++r) {
    std::vector<int32_t> in(16), out(16), starts(16);
    rows.load(r, 1, in.data(), out.data());
    rows.starts(r, 1, starts.data());
    int64_t own = 0;
    for (size_t t = 0; t < 16; ++t) {
      if (out[t] < 0) continue;
      ++own;
      EXPECT_TRUE(seen.insert(out[t]).second);
      const auto& example = examples[static_cast<size_t>(out[t] / 100)];
      const auto start = static_cast<size_t>(starts[t]);
      EXPECT_EQ(in[start], example.tokens[0]);
      EXPECT_EQ(static_cast<size_t>(out[t] % 100), t - start + 1);
      EXPECT_TRUE(example.trained[t - start + 1]);
    }
    EXPECT_EQ(own, rows.count_targets(r));
    targets += own;
  }
  for (const EncodedExample& e : examples) positions += count_targets(e);
  EXPECT_EQ(targets, positions);
  EXPECT_EQ(rows.targets(), positions);
  EXPECT_NE(rows.checksum(), ExampleRows(examples, 16, false).checksum());
}
TEST(Permutation, IsBijectionInEachRound) {
  const Philox random = Philox::named(3, "shuffle");
  for (const uint64_t count : {1U, 2U, 3U, 7U, 64U, 65U, 1000U}) {
    std::set<std::vector<uint64_t>> orders;
    for (uint64_t round = 0; round < 20; ++round) {
      std::vector<uint64_t> order, sorted(count);
      for (uint64_t place = 0; place < count; ++place) order.push_back(permuted(random, round, count, place));
      orders.insert(order);
      std::sort(order.begin(), order.end());
      std::iota(sorted.begin(), sorted.end(), 0);
      EXPECT_EQ(order, sorted);
    }
    EXPECT_GE(orders.size(), count == 1 ? 1 : count == 2 ? 2 : count == 3 ? 4 : 19) << count;
  }
}

// The first position is uniform over five elements: chi-square with four degrees of freedom below its 99.9% quantile.
TEST(Permutation, FirstElementIsUniformlyDistributed) {
  const Philox random = Philox::named(4, "shuffle");
  std::vector<double> firsts(5, 0.0);
  constexpr uint64_t kTrials = 5000;
  for (uint64_t round = 0; round < kTrials; ++round) ++firsts[permuted(random, round, 5, 0)];
  double chi = 0;
  for (const double found : firsts) chi += (found - kTrials / 5.0) * (found - kTrials / 5.0) / (kTrials / 5.0);
  EXPECT_LT(chi, 18.5);
}

}  // namespace
}  // namespace tessera
