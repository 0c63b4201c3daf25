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

// Calls f with each line of a file, which may be compressed (data/jsonl.h), that is not blank, and with its number
// from 1. A byte order mark is dropped. Throws InputError for a file that cannot be read, and for a line of more than
// 64 MiB.
using LineFunction = std::function<void(std::string_view line, int64_t number)>;
void for_each_line(const std::filesystem::path& file, const LineFunction& f);
// Calls f with each line of bytes in memory, in the way of for_each_line().
void for_each_line_of(std::string_view bytes, const std::string& what, const LineFunction& f);

// Whether a name says that it is such a file: .jsonl, also with .gz or .zst behind it.
bool is_jsonl_name(const std::filesystem::path& file);

// Files of text that may be compressed by gzip or zstd, which their first bytes say, not their names.

using TextPiece = std::function<void(std::string_view piece)>;

// Calls f for the text of a file, piece after piece, in a few MiB of memory. Throws InputError for a file that cannot
// be read, that is cut short or damaged, or that grows beyond 256 times its size, as no text does.
void read_text_pieces(const std::filesystem::path& file, const TextPiece& f);

// All of it.
std::string read_text(const std::filesystem::path& file);

// The text of compressed or plain bytes; `what` names them. Throws InputError.
void unpack_text(std::string_view bytes, const std::string& what, const TextPiece& f);

}  // namespace tessera
