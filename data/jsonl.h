// Examples for fine-tuning: a file of JSON. Its rows are values one after another, on a line each or over several, or
// the values of a list; a file that is one object may hold them in columns or as its one list of rows. A row is one of
// these shapes, told by its keys; of several the first that fits. A key that is null is not there; a string is a text.
//
//   {"input_ids": [...], "labels": [...], "attention_mask": [...]}      tokens; a label of -100 is no target
//   {"messages": [{"role": "system|user|assistant|tool", "content": "..."}, ...]}
//   {"conversations": [{"from": "human|gpt|...", "value": "..."}, ...], "system": "..."}      as ShareGPT's
//   {"prompt": "...", "completion": "...", "system": "..."}             both may be lists of messages
//   {"instruction": "...", "input": "...", "output": "...", "system": "..."}
//   {"text": "..."}
//
// A message may have a "weight", 0 or 1, or another flag by which trainers exclude it ("train", "loss", "masked"), and
// its content may be a list of parts that are text. What it has besides, as "tool_calls", and a row's "tools" and
// "documents" are for a model's own template, and so is a role that is none of these. Other keys that would change what
// a model reads are refused; of the rest, Example::unread has the names.
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
  // Whether it is learnt: what an assistant says, unless it belongs to the prompt; a weight of 0: never.
  enum class Learnt : uint8_t { as_usual, as_prompt, never };
  Learnt learnt = Learnt::as_usual;

  std::string more = {};  // its other keys: a JSON object in the order of the row
  bool silent = false;    // it has calls of tools and no text

  bool is_response() const { return role == Role::assistant && learnt == Learnt::as_usual; }
};

struct Example {
  enum class Shape : uint8_t { messages, completion, instruction, text, tokens };
  Shape shape = Shape::text;
  std::vector<Message> turns;         // a text is one turn of the assistant, the others begin with what is asked
  std::string input = {};             // the input of an instruction
  std::string variables = {};         // tools and documents of messages: a JSON object in the order of the row
  std::string unshown = {};           // why no built-in template shows all of it, where that is so
  std::string unknown_role = {};      // one that is none of Role
  std::vector<int32_t> tokens = {};   // where others made them, and
  std::vector<bool> trained = {};     // whether each is a target
  std::set<std::string> mapped = {};  // keys that RowNames names and the row has
  std::set<std::string> unread = {};  // keys that nothing here reads, quoted; of messages followed by kOfMessages
};
inline constexpr std::string_view kOfMessages = " of messages";

std::string_view to_string(Role role);

// Other names of keys, by those above: {{"prompt", "question"}}.
using KeyNames = std::vector<std::pair<std::string, std::string>>;
// The names in "prompt=question,completion=answer". Throws Error (usage) naming the field `map`.
KeyNames parse_key_names(std::string_view text);
// The roles in "developer=system,bot=assistant"; a name that is a role itself may also stand first, as a key of `map`
// does. Throws Error (usage) naming the field `roles`.
std::map<std::string, Role> parse_role_names(std::string_view text);
struct RowNames {
  KeyNames keys = {};
  std::map<std::string, Role> roles = {};
};

// The example in a row; `what` names file and line. A key of `names` that the row does not have is null. Throws
// InputError.
Example parse_example(std::string_view row, const std::string& what, const RowNames& names = {});

// How an example becomes one text: what stands around the turns of a conversation, and which of it is the response.
//
//   chatml   <|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n[So.<|im_end|>]\n
//   llama3   <|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHow?<|eot_id|>
//            <|start_header_id|>assistant<|end_header_id|>\n\n[So.<|eot_id|>]             (no line break between)
//   alpaca   Below is an instruction ...\n\n### Instruction:\nHow?\n\n### Response:\n[So.END]
//   none     How?[So.END]
//
// In brackets the response. END is the tokenizer's own end of a text. A text has no turns: it is all response, and END.
// Sources: OpenAI's ChatML; Meta's Llama 3 model card; Taori et al. 2023, with a line break before the response, as is
// usual today.

enum class ChatTemplate : uint8_t { automatic, chatml, llama3, alpaca, none };

struct Piece {
  // A marker is one special token of the tokenizer; `end` its own end of a text.
  enum class Kind : uint8_t { text, marker, end };
  Kind kind = Kind::text;
  std::string text = {};
  bool response = false;
  bool never = false;       // no target, whatever is trained on
  bool is_content = false;  // text of the example, not of the template
};

// Throws InputError, naming `what`, for an example that the template has no form for: messages without one, or with
// what none shows. `automatic` is chatml for messages, alpaca for instructions, and none for the rest.
std::vector<Piece> render(const Example& example, ChatTemplate style, const std::string& what);

// The template in Jinja; empty for one that has none.
std::string_view jinja_source(ChatTemplate style);

// Calls f with each row of a file, which may be compressed (data/text.h), and with the number of its first line from 1,
// or of the row in an object that holds all of them. A row that is cut short ends with its line, so that the next can
// be read. A byte order mark is dropped. Throws InputError for a file that cannot be read, for a row of more than 64
// MiB, and for an object with several lists of rows.
using LineFunction = std::function<void(std::string_view line, int64_t number)>;
void for_each_line(const std::filesystem::path& file, const LineFunction& f);
// Calls f with each row of bytes in memory, in the way of for_each_line().
void for_each_line(std::string_view bytes, const std::string& what, const LineFunction& f);

// Whether a file holds such rows, which its first bytes say: an object, or a list of objects; in a file whose name ends
// in .json also a list of strings. A file that holds none of these is one where its name ends in .jsonl or .ndjson,
// also with .gz or .zst behind it.
bool holds_examples(const std::filesystem::path& file);

// A note about a file whose name says that it is CSV, TSV or YAML and that is to be read as a text; empty for others.
// Throws InputError if its columns are those of examples.
std::string check_table(const std::filesystem::path& file);

// The files of examples that `data` names: a file; several, or patterns, with commas between them; or a folder without
// dataset.json, of which the files in it whose names say so, as the library `datasets` reads names, are for validation
// ("test" only if none is for that). All are empty if it names no examples. Throws InputError: a pattern that matches
// nothing, a file of another kind among several, and a folder of Parquet or Arrow.
struct ExampleFiles {
  std::vector<std::filesystem::path> train = {}, val = {}, unused = {};
};
ExampleFiles example_files(const std::string& spec);
bool names_examples(const std::string& spec);

}  // namespace tessera
