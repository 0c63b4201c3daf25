// Lines, and what stands on them.
#include "data/jsonl.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "data/compressed.h"
#include "data/json.h"
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
  const Json object = parse_json(line, what);
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

}  // namespace tessera
