// Examples for fine-tuning: a file of JSON, one object on each line. A line is one of four shapes, told by its keys; of
// several the first that fits:
//
//   {"messages": [{"role": "system|user|assistant", "content": "..."}, ...]}
//   {"prompt": "...", "completion": "..."}
//   {"instruction": "...", "input": "..." (may be empty or absent), "output": "..."}
//   {"text": "..."}
//
// Other keys of a line are passed over; a message has its two and no other.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

enum class Role : uint8_t { system, user, assistant };
struct Message {
  Role role = Role::user;
  std::string text;
};

struct Example {
  enum class Shape : uint8_t { messages, completion, instruction, text };
  Shape shape = Shape::text;
  std::vector<Message> turns;  // a text is one turn of the assistant, the others begin with what is asked
  std::string input = {};      // the input of an instruction
};

// The example on a line; `what` names file and line. Throws InputError.
Example parse_example(std::string_view line, const std::string& what);

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
};

// Throws InputError, naming `what`, for an example that the template has no form for: messages without one. `automatic`
// is chatml for messages, alpaca for instructions, and none for the rest.
std::vector<Piece> render(const Example& example, ChatTemplate style, const std::string& what);

// Calls f with each line of a file, which may be compressed (data/text.h), that is not blank, and with its number
// from 1. A byte order mark is dropped. Throws InputError for a file that cannot be read, and for a line of more than
// 64 MiB.
using LineFunction = std::function<void(std::string_view line, int64_t number)>;
void for_each_line(const std::filesystem::path& file, const LineFunction& f);
// Calls f with each line of bytes in memory, in the way of for_each_line().
void for_each_line_of(std::string_view bytes, const std::string& what, const LineFunction& f);

// Whether a name says that it is such a file: .jsonl, also with .gz or .zst behind it.
bool is_jsonl_name(const std::filesystem::path& file);

}  // namespace tessera
