// Examples for fine-tuning in a JSON file. Its rows are consecutive values (one per line or over several lines), the
// items of a list, or, in a file with one object, its columns or its only list of rows. A row has one of the following
// shapes, detected by its keys; the first match wins. A null key counts as missing; a string counts as text.
//
//   {"input_ids": [...], "labels": [...], "attention_mask": [...]}      tokens; a label of -100 is ignored
//   {"messages": [{"role": "system|user|assistant|tool", "content": "..."}, ...]}
//   {"conversations": [{"from": "human|gpt|...", "value": "..."}, ...], "system": "..."}      ShareGPT
//   {"prompt": "...", "completion": "...", "system": "..."}             both may be lists of messages
//   {"instruction": "...", "input": "...", "output": "...", "system": "..."}
//   {"text": "..."}
//
// A message may have a "weight" of 0 or 1, or another flag by which trainers exclude it ("train", "loss", "masked");
// its content may be a list of text parts. Its other keys, such as "tool_calls", and a row's "tools" and "documents"
// are passed to the model's own chat template, as are other roles. Other keys that would change the model's input are
// rejected; Example::unread lists the remaining ones.
#pragma once
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
  // Whether it is trained on: assistant messages, unless they belong to the prompt or have a weight of 0.
  enum class Training : uint8_t { by_role, as_prompt, never };
  Training training = Training::by_role;

  std::string more = {};  // its other keys: a JSON object in the row's order
  bool silent = false;    // has tool calls and no text

  bool is_response() const { return role == Role::assistant && training == Training::by_role; }
};

struct Example {
  enum class Shape : uint8_t { messages, completion, instruction, text, tokens };
  Shape shape = Shape::text;
  std::vector<Message> turns;         // a text is one assistant turn; other shapes begin with the prompt
  std::string input = {};             // of an instruction
  std::string variables = {};         // tools and documents: a JSON object in the row's order
  std::string unshown = {};           // why no built-in template can show all of it; empty otherwise
  std::string unknown_role = {};      // a role other than those of Role
  std::vector<int32_t> tokens = {};   // of a tokenized row, with
  std::vector<bool> trained = {};     // whether each is a target
  std::set<std::string> mapped = {};  // keys renamed by RowNames that the row has
  std::set<std::string> unread = {};  // unused keys, quoted; those of messages end with kOfMessages
};
inline constexpr std::string_view kOfMessages = " of messages";

std::string_view to_string(Role role);

// Alternative names of the keys above: {{"prompt", "question"}}.
using KeyNames = std::vector<std::pair<std::string, std::string>>;
// Parses "prompt=question,completion=answer". Throws Error (usage) naming the field `map`.
KeyNames parse_key_names(std::string_view text);
// Parses "developer=system,bot=assistant". If one name is itself a role, it may also come first, as in `map`. Throws
// Error (usage) naming the field `roles`.
std::map<std::string, Role> parse_role_names(std::string_view text);
struct RowNames {
  KeyNames keys = {};
  std::map<std::string, Role> roles = {};
};

// Parses a row; `what` names file and line. Renamed keys that the row lacks count as null. Throws InputError.
Example parse_example(std::string_view row, const std::string& what, const RowNames& names = {});

// Chat templates: the text around the turns of a conversation, and which part of it is the response.
//
//   chatml   <|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n[So.<|im_end|>]\n
//   llama3   <|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHow?<|eot_id|>
//            <|start_header_id|>assistant<|end_header_id|>\n\n[So.<|eot_id|>]             (no line break between)
//   alpaca   Below is an instruction ...\n\n### Instruction:\nHow?\n\n### Response:\n[So.END]
//   none     How?[So.END]
//
// The response is in brackets; END is the tokenizer's own end of a text. A text has no turns: all of it, with END, is
// the response. Sources: OpenAI's ChatML; Meta's Llama 3 model card; Taori et al. 2023, with a line break before the
// response, as is common today.

enum class ChatTemplate : uint8_t { automatic, chatml, llama3, alpaca, none };
constexpr std::array<std::string_view, 5> kChatTemplateNames = {"auto", "chatml", "llama3", "alpaca", "none"};
constexpr const auto& value_names(ChatTemplate) { return kChatTemplateNames; }

struct Piece {
  // A marker is one special token of the tokenizer; `end` is the tokenizer's own end of a text.
  enum class Kind : uint8_t { text, marker, end };
  Kind kind = Kind::text;
  std::string text = {};
  bool response = false;
  bool never = false;       // never a target, even without responses_only
  bool is_content = false;  // text of the example, not of the template
};

// Throws InputError naming `what` if the template does not support the example: messages in a template without roles,
// or features that no built-in template shows. `automatic` is chatml for messages, alpaca for instructions and none
// otherwise.
std::vector<Piece> render(const Example& example, ChatTemplate style, const std::string& what);

// The template in Jinja, or empty if there is none.
std::string_view jinja_source(ChatTemplate style);

// Calls f with each row of a file, which may be compressed (data/text.h), and its line number from 1 (for rows inside
// one object: the row number). A truncated row ends with its line, so that reading continues at the next. A byte order
// mark is dropped. Throws InputError for unreadable files, rows above 64 MiB, and objects with several lists of rows.
using LineFunction = std::function<void(std::string_view line, int64_t number)>;
void for_each_line(const std::filesystem::path& file, const LineFunction& f);
// Same for bytes in memory.
void for_each_line(std::string_view bytes, const std::string& what, const LineFunction& f);

// Whether a file contains rows, by its first bytes: an object or a list of objects; in .json files also a list of
// strings. A file without any rows counts if its name ends in .jsonl or .ndjson, optionally followed by .gz or .zst.
bool holds_examples(const std::filesystem::path& file);

// A note if a file that is about to be read as text is CSV, TSV or YAML by its name; otherwise empty. Throws InputError
// if its columns are those of examples.
std::string check_table(const std::filesystem::path& file);

// The example files that `data` names: a file; several files or patterns separated by commas; or a directory without
// dataset.json, whose files count as validation data by the name rules of the `datasets` library ("test" only if no
// other file does). All lists are empty if it names no examples. Throws InputError for a pattern without matches,
// another format among several files, and a directory of Parquet or Arrow.
struct ExampleFiles {
  std::vector<std::filesystem::path> train = {}, val = {}, unused = {};
};
ExampleFiles example_files(const std::string& spec);
bool names_examples(const std::string& spec);

}  // namespace tessera
