// The templates, turn by turn.
#include "data/chat_template.h"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "tensor/error.h"

namespace tessera {
namespace {

using Kind = Piece::Kind;

std::string_view name_of(Role role) {
  if (role == Role::system) return "system";
  return role == Role::user ? "user" : "assistant";
}

// As one conversation, whatever the shape: an input stands below its instruction.
std::vector<Message> turns_of(const Example& example) {
  std::vector<Message> turns = example.turns;
  if (!example.input.empty()) turns.front().text += "\n" + example.input;
  return turns;
}

std::vector<Piece> chatml(const Example& example) {
  std::vector<Piece> out;
  for (const Message& turn : turns_of(example)) {
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
  for (const Message& turn : turns_of(example)) {
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
  for (const Message& turn : turns_of(example)) out.push_back({Kind::text, turn.text, turn.role == Role::assistant});
  out.push_back({Kind::end, "", true});
  return out;
}

// Blanks stand between words of Jinja only to be read.
std::string without_blanks(std::string_view text) {
  std::string out;
  for (const char c : text)
    if (c != ' ' && c != '\n' && c != '\t') out += c == '"' ? '\'' : c;
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

// As they stand in tokenizer_config.json of models that many others were made from. One that adds words of its own, as
// a system prompt that nobody gave, is none of these.
std::optional<ChatTemplate> recognised(std::string_view jinja) {
  static constexpr std::array<std::pair<std::string_view, ChatTemplate>, 3> kKnown{
      {{R"({% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' )"
        R"(+ '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %})",
        ChatTemplate::chatml},
       {R"({% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' )"
        R"(+ message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 )"
        R"(== 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if )"
        R"(add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %})",
        ChatTemplate::llama3},
       {R"({% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' )"
        R"(+ message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 )"
        R"(== 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{{ )"
        R"('<|start_header_id|>assistant<|end_header_id|>\n\n' }})",
        ChatTemplate::llama3}}};
  std::string_view body = jinja;
  const std::string said = without_blanks(body);
  for (const auto& [text, style] : kKnown)
    if (without_blanks(text) == said) return style;
  // ChatML's own begins, in many files, by saying what add_generation_prompt is when nobody says it.
  constexpr std::string_view kDefault =
      "{%ifnotadd_generation_promptisdefined%}{%setadd_generation_prompt=false%}{%endif%}";
  if (said.starts_with(kDefault) && said.substr(kDefault.size()) == without_blanks(kKnown[0].first))
    return ChatTemplate::chatml;
  return {};
}

}  // namespace tessera
