// Lines, what stands on them, and what stands around the turns of a conversation.
#include "data/jsonl.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "data/json.h"
#include "data/text.h"
#include "tensor/error.h"

namespace tessera {

namespace {

using Json = nlohmann::json;
constexpr size_t kLongest = size_t{64} << 20;

// Pieces of a file in, whole lines out.
class Lines {
 public:
  Lines(const std::string& what, const LineFunction& f) : what_(what), f_(f) {}

  void add(std::string_view piece) {
    for (size_t end = piece.find('\n'); end != std::string_view::npos; end = piece.find('\n')) {
      keep(piece.substr(0, end));
      finish();
      piece.remove_prefix(end + 1);
    }
    keep(piece);
  }
  void finish() {
    std::string_view line = line_;
    if (++number_ == 1 && line.starts_with("\xEF\xBB\xBF")) line.remove_prefix(3);
    if (line.find_first_not_of(" \t\r") != std::string_view::npos) f_(line, number_);
    line_.clear();
  }

 private:
  void keep(std::string_view part) {
    if (line_.size() + part.size() > kLongest)
      throw InputError(fmt::format("{}:{}: a line of more than {} MiB", what_, number_ + 1, kLongest >> 20));
    line_ += part;
  }

  const std::string& what_;
  const LineFunction& f_;
  std::string line_ = {};
  int64_t number_ = 0;
};

std::string text_of(const Json& object, const char* key, const std::string& what) {
  const auto found = object.find(key);
  if (found == object.end()) throw InputError(fmt::format("{}: the key '{}' is missing", what, key));
  if (found->is_discarded())
    throw InputError(
        fmt::format("{}: the key '{}' stands twice in one object, or is too large or too deep", what, key));
  if (!found->is_string())
    throw InputError(fmt::format("{}: the key '{}' is a {}; expected a string", what, key, found->type_name()));
  return found->get<std::string>();
}

Role role_of(const std::string& name, const std::string& what) {
  if (name == "system") return Role::system;
  if (name == "user") return Role::user;
  if (name == "assistant") return Role::assistant;
  throw InputError(fmt::format("{}: the role '{}'; expected system, user or assistant", what, name.substr(0, 40)));
}

std::vector<Message> turns_of(const Json& messages, const std::string& what) {
  if (!messages.is_array() || messages.empty())
    throw InputError(fmt::format("{}: the key 'messages' must be a list of messages that is not empty", what));
  std::vector<Message> turns;
  for (const Json& message : messages) {
    const std::string where = fmt::format("{}: message {}", what, turns.size() + 1);
    if (!message.is_object()) throw InputError(where + " is no object");
    for (const auto& [key, value] : message.items())
      if (key != "role" && key != "content")
        throw InputError(fmt::format("{} has the key '{}'; expected role and content alone", where, key.substr(0, 40)));
    turns.push_back({role_of(text_of(message, "role", where), where), text_of(message, "content", where)});
  }
  return turns;
}

}  // namespace

Example parse_example(std::string_view line, const std::string& what) {
  const Json object = parse_json(line, what, JsonFile::others);
  if (!object.is_object()) throw InputError(what + ": expected an object");
  const auto text = [&](const char* key) { return text_of(object, key, what); };
  using Shape = Example::Shape;
  if (object.contains("messages")) return {Shape::messages, turns_of(object["messages"], what)};
  if (object.contains("prompt") && object.contains("completion"))
    return {Shape::completion, {{Role::user, text("prompt")}, {Role::assistant, text("completion")}}};
  if (object.contains("instruction"))
    return {Shape::instruction,
            {{Role::user, text("instruction")}, {Role::assistant, text("output")}},
            object.contains("input") ? text("input") : ""};
  if (object.contains("text")) return {Shape::text, {{Role::assistant, text("text")}}};
  throw InputError(fmt::format(
      "{}: expected messages, prompt and completion, instruction and output, or text among its keys", what));
}

void for_each_line(const std::filesystem::path& file, const LineFunction& f) {
  const std::string what = file.string();
  Lines lines(what, f);
  read_text_pieces(file, [&](std::string_view piece) { lines.add(piece); });
  lines.finish();
}

void for_each_line_of(std::string_view bytes, const std::string& what, const LineFunction& f) {
  Lines lines(what, f);
  lines.add(bytes);
  lines.finish();
}

bool is_jsonl_name(const std::filesystem::path& file) {
  const std::string extension = file.extension().string();
  if (extension == ".gz" || extension == ".zst") return file.stem().extension() == ".jsonl";
  return extension == ".jsonl";
}

// The templates, turn by turn.

namespace {

using Kind = Piece::Kind;

std::string_view name_of(Role role) {
  if (role == Role::system) return "system";
  return role == Role::user ? "user" : "assistant";
}

// As one conversation, whatever the shape: an input stands below its instruction.
std::vector<Message> conversation(const Example& example) {
  std::vector<Message> turns = example.turns;
  if (!example.input.empty()) turns.front().text += "\n" + example.input;
  return turns;
}

std::vector<Piece> chatml(const Example& example) {
  std::vector<Piece> out;
  for (const Message& turn : conversation(example)) {
    const bool response = turn.role == Role::assistant;
    out.push_back({Kind::marker, "<|im_start|>"});
    out.push_back({Kind::text, std::string(name_of(turn.role)) + "\n"});
    out.push_back({Kind::text, turn.text, response});
    out.push_back({Kind::marker, "<|im_end|>", response});
    out.push_back({Kind::text, "\n"});
  }
  return out;
}

std::string trimmed(const std::string& text) {
  constexpr const char* kSpace = " \t\n\r\f\v";
  const size_t first = text.find_first_not_of(kSpace);
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(kSpace) + 1 - first);
}

std::vector<Piece> llama3(const Example& example) {
  std::vector<Piece> out{{Kind::marker, "<|begin_of_text|>"}};
  for (const Message& turn : conversation(example)) {
    const bool response = turn.role == Role::assistant;
    out.push_back({Kind::marker, "<|start_header_id|>"});
    out.push_back({Kind::text, std::string(name_of(turn.role))});
    out.push_back({Kind::marker, "<|end_header_id|>"});
    out.push_back({Kind::text, "\n\n"});
    out.push_back({Kind::text, trimmed(turn.text), response});
    out.push_back({Kind::marker, "<|eot_id|>", response});
  }
  return out;
}

std::vector<Piece> alpaca(const Example& example) {
  const bool asks = !example.input.empty();
  std::string before = fmt::format(
      "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.",
      asks ? ", paired with an input that provides further context" : "");
  std::vector<Piece> out;
  for (const Message& turn : example.turns) {
    if (turn.role == Role::system) {
      before = turn.text;
    } else if (turn.role == Role::user) {
      out.push_back({Kind::text, (out.empty() ? before : "") + "\n\n### Instruction:\n" + turn.text +
                                     (asks ? "\n\n### Input:\n" + example.input : "") + "\n\n### Response:\n"});
    } else {
      out.push_back({Kind::text, turn.text, true});
      out.push_back({Kind::end, "", true});
    }
  }
  return out;
}

std::vector<Piece> plain(const Example& example) {
  std::vector<Piece> out;
  for (const Message& turn : conversation(example))
    out.push_back({Kind::text, turn.text, turn.role == Role::assistant});
  out.push_back({Kind::end, "", true});
  return out;
}

}  // namespace

std::vector<Piece> render(const Example& example, ChatTemplate style, const std::string& what) {
  using Shape = Example::Shape;
  if (example.shape == Shape::text) return plain(example);
  if (style == ChatTemplate::automatic) {
    style = ChatTemplate::none;
    if (example.shape == Shape::messages) style = ChatTemplate::chatml;
    if (example.shape == Shape::instruction) style = ChatTemplate::alpaca;
  }
  if (style == ChatTemplate::chatml) return chatml(example);
  if (style == ChatTemplate::llama3) return llama3(example);
  if (style == ChatTemplate::alpaca) return alpaca(example);
  if (example.shape == Shape::messages)
    throw InputError(what + ": messages need a `template`: expected chatml, llama3 or alpaca, found none");
  return plain(example);
}

}  // namespace tessera
