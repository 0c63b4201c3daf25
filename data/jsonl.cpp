// Parsing of rows.
#include "data/jsonl.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <span>

#include "base/bad_input.h"
#include "base/json.h"
#include "base/utf8.h"
#include "data/text.h"

namespace tessera {

namespace {

using Json = nlohmann::json;
using InOrder = nlohmann::ordered_json;
// Names of roles, including ShareGPT's.
constexpr std::pair<std::string_view, Role> kRoles[] = {
    {"system", Role::system},     {"user", Role::user},       {"assistant", Role::assistant},
    {"tool", Role::tool},         {"human", Role::user},      {"gpt", Role::assistant},
    {"chatgpt", Role::assistant}, {"model", Role::assistant}, {"observation", Role::tool}};
// kRefused: keys of a row that no shape uses but that would change the model's input. kShown: such keys of a message.
constexpr std::array<std::string_view, 13> kRefused{"tools",   "functions", "documents",   "chosen", "rejected",
                                                    "history", "image",     "images",      "videos", "audio",
                                                    "audios",  "system",    "position_ids"};
constexpr std::array<std::string_view, 12> kShown{"tool_calls", "function_call", "reasoning_content",
                                                  "reasoning",  "thinking",      "tools",
                                                  "documents",  "image",         "images",
                                                  "videos",     "audio",         "audios"};
constexpr std::string_view kCalls = "tool_calls";
// Keys that control whether a message is trained on, with the values that exclude and include it: OpenAI and Mistral,
// Axolotl, ms-swift and XTuner, torchtune, and other spellings in use.
struct Flag {
  std::string_view key, excludes, includes;
};
constexpr std::array<Flag, 12> kFlags{{{"weight", "0", "1"},
                                       {"loss_weight", "0", "1"},
                                       {"loss_scale", "0", "1"},
                                       {"train", "false", "true"},
                                       {"training", "false", "true"},
                                       {"trainable", "false", "true"},
                                       {"loss", "false", "true"},
                                       {"learn", "false", "true"},
                                       {"mask", "true", "false"},
                                       {"masked", "true", "false"},
                                       {"ignore", "true", "false"},
                                       {"ignore_loss", "true", "false"}}};
// Substrings of further keys that seem to exclude a message: kLearns if false or 0, kExcludes if true or 1.
constexpr std::array<std::string_view, 4> kLearns{"train", "loss", "learn", "supervis"};
constexpr std::array<std::string_view, 6> kExcludes{"mask", "ignor", "skip", "exclu", "no_loss", "no_train"};
constexpr std::array<std::string_view, 2> kInnerFlags{"train_detail", "training_detail"};  // Axolotl: per character
constexpr std::array<std::string_view, 2> kVariables{"tools", "documents"};                // passed to templates
constexpr std::array<std::string_view, 12> kRead{"input_ids",     "labels", "attention_mask", "messages",
                                                 "conversations", "system", "prompt",         "completion",
                                                 "instruction",   "input",  "output",         "text"};

template <class List, class Name>
bool is_in(const List& list, const Name& name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

bool is_empty(const Json& value) {
  return value.is_null() || (value.is_string() && value.get_ref<const std::string&>().empty()) ||
         (value.is_structured() && value.empty());
}

bool says_nothing(const Json& value) { return is_empty(value) || value == Json(false); }

const Json& present(const Json& object, const char* key, const std::string& what) {
  const Json& found = value_at(object, key);
  if (found.is_null()) bad_input("{}: the key '{}' is missing", what, key);
  if (found.is_discarded()) bad_input("{}: the key '{}' is a duplicate, too large or nested too deeply", what, key);
  return found;
}

std::string to_string(const Json& object, const char* key, const std::string& what) {
  const Json& found = present(object, key, what);
  if (!found.is_string()) bad_input("{}: the key '{}' is a {}; expected a string", what, key, found.type_name());
  return found.get<std::string>();
}

// A string, or a list of text parts.
std::string token_content(const Json& message, const char* key, const std::string& what) {
  if (!present(message, key, what).is_array()) return to_string(message, key, what);
  std::string out;
  for (const Json& part : message[key]) {
    if (value_at(part, "type") != "text")
      bad_input("{}: a content part of type {}; expected text", what, shown(value_at(part, "type"), 40));
    out += to_string(part, "text", what);
  }
  return out;
}

// nullopt for a role that only a model's own template may define.
std::optional<Role> find_role(std::string_view name, size_t known = std::size(kRoles)) {
  const auto roles = std::span(kRoles).first(known);
  const auto found = std::ranges::find(roles, name, &std::pair<std::string_view, Role>::first);
  return found == roles.end() ? std::nullopt : std::optional(found->second);
}

// Parses JSON inside a string.
InOrder unpacked(const InOrder& value) {
  if (!value.is_string()) return value;
  const auto inside = InOrder::parse(value.get_ref<const std::string&>(), nullptr, false);
  return inside.is_structured() ? inside : value;
}

// Parses the arguments of tool calls, as other programs do before rendering OpenAI's rows.
void unpack_arguments(InOrder& calls) {
  for (InOrder& call : calls)
    if (call.is_object() && call.contains("function") && call["function"].is_object() &&
        call["function"].contains("arguments"))
      call["function"]["arguments"] = unpacked(call["function"]["arguments"]);
}

bool is_complete(const Json& value) {
  return !value.is_discarded() && (!value.is_structured() || std::all_of(value.begin(), value.end(), is_complete));
}

std::string flag_keys() {
  std::string keys;
  for (const Flag& flag : kFlags) keys += fmt::format("{}{}", keys.empty() ? "" : ", ", flag.key);
  return keys;
}

// Whether flags include the message; nullopt without flags.
std::optional<bool> included(const Json& message, Role role, const std::string& what) {
  std::optional<bool> out;
  std::string_view first;
  for (const auto& [key, excludes, includes] : kFlags) {
    const Json& value = value_at(message, key);
    if (value.is_null()) continue;
    const bool known = value.is_boolean() || value == 0 || value == 1;
    const bool set = value == 1 || value == Json(true), learns = set == (includes == "1" || includes == "true");
    if (!known || (learns && role != Role::assistant))
      bad_input("{}: the key '{}' is {}; expected {}, or {} for an assistant", what, key, shown(value, 40), excludes,
                includes);
    if (out.value_or(learns) != learns) bad_input("{}: the keys '{}' and '{}' are contradictory", what, first, key);
    out = learns, first = key;
  }
  for (const auto& [key, value] : message.items()) {
    const bool off = value == 0 || value == Json(false), on = value == 1 || value == Json(true);
    const auto has = [&key = key](std::string_view word) { return key.find(word) != std::string::npos; };
    if (role == Role::assistant && std::ranges::count(kFlags, key, &Flag::key) == 0 &&
        ((off && std::ranges::any_of(kLearns, has)) || (on && std::ranges::any_of(kExcludes, has))))
      bad_input("{}: the key '{}' looks like one that excludes a message from the loss; expected {}", what,
                key.substr(0, 40), flag_keys());
  }
  for (const std::string_view key : kInnerFlags)
    if (!says_nothing(value_at(message, key)))
      bad_input("{}: the key '{}' excludes part of a message; only complete messages can be excluded", what, key);
  return out;
}

// `ordered` returns the row with ordered keys; called only if a model's own template uses a key.
template <class F>
Message parse_message(const Json& json, const std::string& what, const RowNames& names, Example& example,
                      const F& ordered) {
  if (!json.is_object()) throw InputError(what + " is not an object");
  const char* const role = value_at(json, "role").is_null() && json.contains("from") ? "from" : "role";
  const char* const content = value_at(json, "content").is_null() && json.contains("value") ? "value" : "content";
  InOrder more;
  for (const auto& [key, value] : json.items()) {
    if (key == role || key == content || value.is_null() || std::ranges::count(kFlags, key, &Flag::key) > 0) continue;
    if (!is_complete(value))
      bad_input("{}: the key '{}' contains a duplicate key, or a value that is too large or nested too deeply", what,
                key.substr(0, 40));
    more[key] = nullptr;
    if (is_in(kShown, key)) {
      if (example.unshown.empty() && !says_nothing(value))
        example.unshown =
            fmt::format("{} has the key '{}'; expected only role, content and weight", what, key.substr(0, 40));
    } else if (!is_empty(value)) {
      example.unread.insert("'" + key.substr(0, 40) + "'" + std::string(kOfMessages));
    }
  }
  const bool calls = !says_nothing(value_at(json, kCalls)), silent = calls && value_at(json, content).is_null();
  const std::string name = to_string(json, role, what);
  const auto mapped = names.roles.find(name);
  const std::optional<Role> known = mapped == names.roles.end() ? find_role(name) : std::optional(mapped->second);
  if (!known) example.unknown_role = name.substr(0, 40);
  Message out{known.value_or(Role::user), silent ? "" : token_content(json, content, what)};
  if (!known && example.unshown.empty())
    example.unshown =
        fmt::format("{}: the role '{}'; expected system, user, assistant or tool, or one of these assigned by `roles`",
                    what, name.substr(0, 40));
  if (!more.empty() || !known) {
    InOrder rest;
    if (!known) rest["role"] = name;
    for (const auto& [key, value] : ordered().items())
      if (more.contains(key)) rest[key] = value;
    if (calls && rest[kCalls].is_array()) unpack_arguments(rest[kCalls]);
    for (const char* const thought : {"reasoning_content", "thinking", "reasoning"})  // synonyms in transformers
      if (const auto thoughts = rest.find(thought); thoughts != rest.end()) {
        const InOrder value = *thoughts;
        rest["reasoning_content"] = value;
        if (!rest.contains("thinking")) rest["thinking"] = value;
        break;
      }
    out.more = rest.dump();
    out.silent = silent;
  }
  if (!included(json, out.role, what).value_or(true)) out.training = Message::Training::never;
  return out;
}

class RowReader {
 public:
  RowReader(const Json& row, std::string_view line, const RowNames& names, const std::string& what)
      : row_(row), line_(line), names_(names), what_(what) {}

  Example read() {
    const auto fits = [&](const Known& known) {
      return std::ranges::all_of(known.keys, [&](const char* key) { return key == nullptr || has(key); });
    };
    const auto* const found = std::ranges::find_if(kShapes, fits);
    if (found == kShapes.end()) fail();
    out_.shape = found->shape;
    (this->*found->read)();
    InOrder variables;
    for (const auto& [key, value] : row_.items()) {
      if (read_.contains(key) || is_empty(value)) continue;
      if (!is_in(kRefused, key)) {
        out_.unread.insert("'" + key.substr(0, 40) + "'");
        continue;
      }
      if (says_nothing(value)) continue;
      const std::string why =
          fmt::format("{}: the key '{}' would change the model's input; a row of {} does not support it", what_, key,
                      found->keys[0]);
      if (out_.shape != Shape::messages || !is_in(kVariables, key) || !is_complete(value)) throw InputError(why);
      if (out_.unshown.empty()) out_.unshown = why;
      variables[key] = unpacked(in_order()[theirs(key)]);
    }
    if (!variables.empty()) out_.variables = variables.dump();
    return std::move(out_);
  }

 private:
  using Shape = Example::Shape;
  struct Known {
    std::array<const char*, 2> keys;  // that identify the shape
    Shape shape;
    void (RowReader::*read)();
  };
  static const std::array<Known, 6> kShapes;

  // The ordered row with original keys.
  const InOrder& in_order() {
    if (in_order_.is_null()) in_order_ = InOrder::parse(line_, nullptr, false);
    if (in_order_.is_discarded())
      throw InputError(what_ + ": a row with tools contains numbers that are not valid JSON");
    return in_order_;
  }
  std::string theirs(const std::string& key) const {
    const auto found = std::ranges::find(names_.keys, key, &KeyNames::value_type::first);
    return found == names_.keys.end() ? key : found->second;
  }
  bool has(const char* key) const { return !value_at(row_, key).is_null(); }
  std::string text(const char* key) {
    read_.insert(key);
    return to_string(row_, key, what_);
  }
  void add(Role role, const char* key) { out_.turns.push_back({role, text(key)}); }
  void add_system() {
    if (read_.insert("system"); !says_nothing(value_at(row_, "system"))) add(Role::system, "system");
  }
  void add_turns(const char* key) {
    read_.insert(key);
    const Json& list = present(row_, key, what_);
    if (!list.is_array() || list.empty())
      bad_input("{}: the key '{}' must be a non-empty list of messages", what_, key);
    for (size_t i = 0; i < list.size(); ++i)
      out_.turns.push_back(parse_message(list[i], fmt::format("{}: message {}", what_, i + 1), names_, out_,
                                         [&]() -> const InOrder& { return in_order()[theirs(key)][i]; }));
  }
  std::vector<int64_t> integers(const char* key, size_t count) {
    read_.insert(key);
    std::vector<int64_t> out;
    const Json& list = present(row_, key, what_);
    const auto is_number = [](const Json& n) { return n.is_number_integer() && n >= INT32_MIN && n <= INT32_MAX; };
    if (!list.is_array() || !std::ranges::all_of(list, is_number))
      bad_input("{}: the key '{}' must be a list of integers", what_, key);
    for (const Json& n : list) out.push_back(n.get<int64_t>());
    if (count > 0 && out.size() != count)
      bad_input("{}: the key '{}' has {} elements; expected {}, as in input_ids", what_, key, out.size(), count);
    return out;
  }

  void tokens() {
    const std::vector<int64_t> ids = integers("input_ids", 0);
    if (ids.empty()) throw InputError(what_ + ": the key 'input_ids' is empty");
    const std::vector<int64_t> labels = has("labels") ? integers("labels", ids.size()) : ids;
    const std::vector<int64_t> mask =
        has("attention_mask") ? integers("attention_mask", ids.size()) : std::vector<int64_t>(ids.size(), 1);
    const auto first = std::ranges::find_if(mask, [](int64_t m) { return m != 0; }),
               end = std::find(first, mask.end(), 0);
    if (first == mask.end() || std::any_of(end, mask.end(), [](int64_t m) { return m != 0; }))
      throw InputError(what_ + ": the key 'attention_mask' masks " +
                       (first == mask.end() ? "all tokens; expected at least one unmasked token"
                                            : "tokens between others; expected only leading and trailing ones masked"));
    for (auto i = static_cast<size_t>(first - mask.begin()); i < static_cast<size_t>(end - mask.begin()); ++i) {
      if (ids[i] < 0 || (labels[i] != -100 && labels[i] != ids[i]))
        bad_input("{}: label {} is {}, but its token is {}; expected this token or -100", what_, i, labels[i], ids[i]);
      out_.tokens.push_back(static_cast<int32_t>(ids[i]));
      out_.trained.push_back(labels[i] != -100);
    }
  }
  void messages() { add_turns("messages"); }
  void conversations() {
    add_system();
    add_turns("conversations");
  }
  void completion() {
    add_system();
    if (!row_["prompt"].is_array()) return add(Role::user, "prompt"), add(Role::assistant, "completion");
    out_.shape = Shape::messages;
    add_turns("prompt");
    for (Message& turn : out_.turns)
      if (turn.training == Message::Training::by_role) turn.training = Message::Training::as_prompt;
    add_turns("completion");
  }
  void instruction() {
    add_system();
    add(Role::user, "instruction"), add(Role::assistant, "output");
    if (has("input")) out_.input = text("input");
  }
  void plain_text() { add(Role::assistant, "text"); }

  [[noreturn]] void fail() const {
    for (const auto& [ours, theirs] : names_.keys)
      if (!row_.contains(ours)) bad_input("{}: the key '{}', named in `map`, is missing", what_, theirs);
    std::string found;
    for (const auto& [key, value] : row_.items()) found += (found.empty() ? "" : ", ") + key.substr(0, 40);
    bad_input(
        "{}: expected input_ids, messages, conversations, prompt and completion, instruction and output, or text among "
        "its keys{}",
        what_, found.empty() ? "" : "; got " + found.substr(0, 200) + "; `map` assigns other names to these keys");
  }

  const Json& row_;
  std::string_view line_;
  const RowNames& names_;
  const std::string& what_;
  InOrder in_order_ = {};
  Example out_ = {};
  std::set<std::string> read_ = {};
};

const std::array<RowReader::Known, 6> RowReader::kShapes{
    {{{"input_ids", nullptr}, Shape::tokens, &RowReader::tokens},
     {{"messages", nullptr}, Shape::messages, &RowReader::messages},
     {{"conversations", nullptr}, Shape::messages, &RowReader::conversations},
     {{"prompt", "completion"}, Shape::completion, &RowReader::completion},
     {{"instruction", nullptr}, Shape::instruction, &RowReader::instruction},
     {{"text", nullptr}, Shape::text, &RowReader::plain_text}}};

// Renames keys of the row; returns the original keys found. A standard key whose alternative is missing is removed.
std::set<std::string> name_calls(Json& row, const KeyNames& names) {
  std::set<std::string> found;
  Json renamed = Json::object();
  for (const auto& [ours, theirs] : names)
    if (row.contains(theirs)) renamed[ours] = std::move(row[theirs]), found.insert(theirs);
  for (const auto& [ours, theirs] : names) row.erase(ours), row.erase(theirs);
  row.update(renamed);
  return found;
}

}  // namespace

std::string_view to_string(Role role) { return kRoles[static_cast<size_t>(role)].first; }

KeyNames parse_key_names(std::string_view text) {
  KeyNames out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string_view one = text.substr(at, end - at);
    const size_t equals = std::min(one.find('='), one.size());
    const std::string ours(one.substr(0, equals)), theirs(one.substr(std::min(equals + 1, one.size())));
    if (theirs.empty() || !is_in(kRead, ours) ||
        std::ranges::find(out, ours, &KeyNames::value_type::first) != out.end())
      throw FieldError("map", fmt::format("expected each of {} at most once, as FIELD=KEY,FIELD=KEY; got '{}'",
                                          fmt::join(kRead, ", "), one));
    out.emplace_back(ours, theirs);
    at = end + 1;
  }
  return out;
}

std::map<std::string, Role> parse_role_names(std::string_view text) {
  std::map<std::string, Role> out;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string_view one = text.substr(at, end - at);
    const size_t equals = std::min(one.find('='), one.size());
    std::string_view ours = one.substr(0, equals), theirs = one.substr(std::min(equals + 1, one.size()));
    if (!find_role(ours, 4)) std::swap(ours, theirs);
    if (theirs.empty() || !find_role(ours, 4) || !out.emplace(theirs, *find_role(ours, 4)).second)
      throw FieldError("roles", fmt::format("expected unique names, as NAME=ROLE,NAME=ROLE, with the roles "
                                            "system, user, assistant and tool; got '{}'",
                                            one));
    at = end + 1;
  }
  return out;
}

Example parse_example(std::string_view line, const std::string& what, const RowNames& names) {
  Json row = parse_json(line, what, JsonFile::others);
  if (row.is_string()) row = {{"text", row}};
  if (!row.is_object()) throw InputError(what + ": expected an object or a string");
  const std::set<std::string> found = name_calls(row, names.keys);
  Example out = RowReader(row, line, names, what).read();
  out.mapped = found;
  return out;
}

}  // namespace tessera
