// Built-in chat templates.
#include "data/chat_template.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/utf8.h"

namespace tessera {

namespace {

using SegmentKind = Segment::Kind;

// Places an input below its instruction.
std::vector<Message> conversation(const Example& example) {
  std::vector<Message> turns = example.turns;
  for (Message& turn : turns)
    if (turn.role == Role::user && !example.input.empty()) turn.text += "\n" + example.input;
  return turns;
}

Segment make_segment(const Message& turn, SegmentKind kind, std::string text) {
  return {kind, std::move(text), turn.is_response(), turn.training == Message::Training::never,
          kind == SegmentKind::text};
}

std::vector<Segment> chatml(const Example& example) {
  std::vector<Segment> out;
  for (const Message& turn : conversation(example))
    out.insert(out.end(), {{SegmentKind::marker, "<|im_start|>"},
                           {SegmentKind::text, std::string(to_string(turn.role)) + "\n"},
                           make_segment(turn, SegmentKind::text, turn.text),
                           make_segment(turn, SegmentKind::marker, "<|im_end|>"),
                           {SegmentKind::text, "\n"}});
  return out;
}

bool is_ascii_space(char32_t c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

std::vector<Segment> llama3(const Example& example) {
  std::vector<Segment> out{{SegmentKind::marker, "<|begin_of_text|>"}};
  for (const Message& turn : conversation(example))
    out.insert(out.end(),
               {{SegmentKind::marker, "<|start_header_id|>"},
                {SegmentKind::text, std::string(to_string(turn.role))},
                {SegmentKind::marker, "<|end_header_id|>"},
                {SegmentKind::text, "\n\n"},
                make_segment(turn, SegmentKind::text, std::string(stripped(turn.text, true, true, is_ascii_space))),
                make_segment(turn, SegmentKind::marker, "<|eot_id|>")});
  return out;
}

std::vector<Segment> alpaca(const Example& example) {
  const bool input = !example.input.empty();
  Segment before{
      .text = fmt::format(
          "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.",
          input ? ", paired with an input that provides further context" : "")};
  std::vector<Segment> out;
  for (const Message& turn : example.turns) {
    const Segment segment = make_segment(turn, SegmentKind::text, turn.text);
    if (turn.role == Role::system) {
      before = segment;
    } else if (turn.role == Role::user) {
      if (out.empty()) out.push_back(before);
      out.insert(out.end(), {{.text = "\n\n### Instruction:\n"}, segment});
      if (input) out.insert(out.end(), {{.text = "\n\n### Input:\n"}, {.text = example.input, .is_content = true}});
      out.push_back({.text = "\n\n### Response:\n"});
    } else {
      out.insert(out.end(), {segment, make_segment(turn, SegmentKind::end, "")});
    }
  }
  return out;
}

std::vector<Segment> plain(const Example& example) {
  std::vector<Segment> out;
  for (const Message& turn : conversation(example)) out.push_back(make_segment(turn, SegmentKind::text, turn.text));
  out.push_back({SegmentKind::end, "", true});
  return out;
}

// As in tokenizer_config.json of widely used base models.
constexpr std::string_view kChatml =
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
constexpr std::string_view kLlama3 =
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";

}  // namespace

std::string_view jinja_source(ChatTemplate style) {
  return style == ChatTemplate::chatml ? kChatml : style == ChatTemplate::llama3 ? kLlama3 : "";
}

std::vector<Segment> render(const Example& example, ChatTemplate style, const std::string& what) {
  using Shape = Example::Shape;
  if (example.shape == Shape::text) return plain(example);
  if (!example.unshown.empty()) throw InputError(example.unshown);
  const auto any = [&](Role role) {
    return std::ranges::find(example.turns, role, &Message::role) != example.turns.end();
  };
  if (style == ChatTemplate::automatic) {
    style = ChatTemplate::none;
    if (example.shape == Shape::messages) style = ChatTemplate::chatml;
    if (example.shape == Shape::instruction) style = ChatTemplate::alpaca;
  }
  if (style == ChatTemplate::chatml) return chatml(example);
  if (style == ChatTemplate::llama3) return llama3(example);
  if (style == ChatTemplate::alpaca && any(Role::tool))
    throw InputError(what + ": `template` alpaca does not support the role tool; use chatml or llama3");
  if (style == ChatTemplate::alpaca) return alpaca(example);
  if (any(Role::system) && example.shape != Shape::messages)
    throw InputError(what + ": the key 'system' requires `template` chatml, llama3 or alpaca");
  if (example.shape == Shape::messages)
    throw InputError(what + ": messages require `template` chatml, llama3 or alpaca");
  return plain(example);
}

}  // namespace tessera
