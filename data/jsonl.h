// Examples for fine-tuning in a JSON file. Rows are consecutive values (on one or several lines), the items of a list,
// or the columns, or the only list of rows, of one object. A row has one of the following shapes; the first match wins.
// Null counts as missing; a string counts as text.
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
#include <cstdint>
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

}  // namespace tessera
