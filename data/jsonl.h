// Examples for fine-tuning in a JSON file. Rows are consecutive values (on one or several lines), the items of a list,
// or the columns or only list of rows of one object. A row has one of the following shapes; the first match wins. Null
// counts as missing; a string counts as text.
//
//   {"input_ids": [...], "labels": [...], "attention_mask": [...]}      tokens; a label of -100 is ignored
//   {"messages": [{"role": "system|user|assistant|tool", "content": "..."}, ...]}
//   {"conversations": [{"from": "human|gpt|...", "value": "..."}, ...], "system": "..."}      ShareGPT
//   {"prompt": "...", "completion": "...", "system": "..."}             both may be lists of messages
//   {"instruction": "...", "input": "...", "output": "...", "system": "..."}
//   {"text": "..."}
//
// A "weight" of 0 or another flag ("train", "loss", "masked") excludes a message from training; content may be a list
// of text parts. A message's other keys and roles, and a row's "tools" and "documents", are passed to the model's own
// chat template. Other keys that would change the model's input are rejected; Example::unread lists the rest.
#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

enum class Role : uint8_t { system, user, assistant, tool };
struct Message {
  Role role = Role::user;
  std::string text;
  // by_role: assistant messages are trained on.
  enum class Training : uint8_t { by_role, as_prompt, never };
  Training training = Training::by_role;

  std::string more = {};  // other keys, as a JSON object in the row's order
  bool silent = false;    // has tool calls and no text

  bool is_response() const { return role == Role::assistant && training == Training::by_role; }
};

struct Example {
  enum class Shape : uint8_t { messages, completion, instruction, text, tokens };
  Shape shape = Shape::text;
  std::vector<Message> turns;         // a text is one assistant turn; other shapes begin with the prompt
  std::string input = {};             // of an instruction
  std::string variables = {};         // tools and documents, as a JSON object in the row's order
  std::string unshown = {};           // why no built-in template supports the example
  std::string unknown_role = {};      // not in Role
  std::vector<int32_t> tokens = {};   // of a tokenized row
  std::vector<bool> trained = {};     // which tokens are targets
  std::set<std::string> mapped = {};  // keys that RowNames renamed
  std::set<std::string> unread = {};  // unused keys, quoted; with suffix kOfMessages in messages
};
inline constexpr std::string_view kOfMessages = " of messages";

std::string_view to_string(Role role);

// Standard and alternative key: {{"prompt", "question"}}.
using KeyNames = std::vector<std::pair<std::string, std::string>>;
// Parses "prompt=question,completion=answer". Throws Error (usage) naming the field `map`.
KeyNames parse_key_names(std::string_view text);
// Parses "developer=system,bot=assistant". If one name is itself a role, the order does not matter. Throws Error
// (usage) naming the field `roles`.
std::map<std::string, Role> parse_role_names(std::string_view text);
struct RowNames {
  KeyNames keys = {};
  std::map<std::string, Role> roles = {};
};

// Throws InputError.
Example parse_example(std::string_view row, const std::string& what, const RowNames& names = {});

// Chat templates: the text around the turns and the response of a conversation.
//
//   chatml   <|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n[So.<|im_end|>]\n
//   llama3   <|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHow?<|eot_id|>
//            <|start_header_id|>assistant<|end_header_id|>\n\n[So.<|eot_id|>]             (no line break between)
//   alpaca   Below is an instruction ...\n\n### Instruction:\nHow?\n\n### Response:\n[So.END]
//   none     How?[So.END]
//
// The response is in brackets; END is the tokenizer's end-of-text token. A text's response is the full text and END.
// Sources: OpenAI's ChatML; Meta's Llama 3 model card; Taori et al. 2023, with a line break before the response, as is
// common today.

enum class ChatTemplate : uint8_t { automatic, chatml, llama3, alpaca, none };
constexpr std::array<std::string_view, 5> kChatTemplateNames = {"auto", "chatml", "llama3", "alpaca", "none"};
constexpr const auto& value_names(ChatTemplate) { return kChatTemplateNames; }

struct Segment {
  // marker: one special token; end: the tokenizer's end-of-text token.
  enum class Kind : uint8_t { text, marker, end };
  Kind kind = Kind::text;
  std::string text = {};
  bool response = false;
  bool never = false;       // never a target, even without responses_only
  bool is_content = false;  // from the example, not the template
};

// Throws InputError for messages in a template without roles, and for features that no built-in template supports.
// `automatic` is chatml for messages, alpaca for instructions and none otherwise.
std::vector<Segment> render(const Example& example, ChatTemplate style, const std::string& what);

// Empty if the style has none.
std::string_view jinja_source(ChatTemplate style);

// Calls f with each row of a file, possibly compressed, and its line number from 1 (inside one object: its row number).
// A truncated row ends with its line. Throws InputError for unreadable files, rows above 64 MiB, and objects with
// several lists of rows.
using LineFunction = std::function<void(std::string_view line, int64_t number)>;
void for_each_line(const std::filesystem::path& file, const LineFunction& f);
void for_each_line(std::string_view bytes, const std::string& what, const LineFunction& f);

// Whether the first bytes are an object or a list of objects; in .json files also a list of strings. A file without
// rows counts if it is named .jsonl or .ndjson (.gz, .zst).
bool holds_examples(const std::filesystem::path& file);

// Returns a note if a file to be read as text is CSV, TSV or YAML by its name. Throws InputError if its columns are
// keys of examples.
std::string check_table(const std::filesystem::path& file);

// The example files that `data` names: a file; several files or patterns separated by commas; or a directory without
// dataset.json, whose files count as validation data by the name rules of the `datasets` library ("test" only if no
// other file does). Empty if `data` names no examples. Throws InputError for a pattern without matches, a file of
// another format among several, and a directory of Parquet or Arrow.
struct ExampleFiles {
  std::vector<std::filesystem::path> train = {}, val = {}, unused = {};
};
ExampleFiles example_files(const std::string& spec);
bool names_examples(const std::string& spec);

}  // namespace tessera
