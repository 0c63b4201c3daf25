// Chat templates of models.
#include <algorithm>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bad_input.h"
#include "data/jinja/template.h"

namespace tessera {
namespace {

// Unicode noncharacters that enclose special tokens' names in messages during rendering.
constexpr std::string_view kOpens = "\uFDD0", kCloses = "\uFDD1";

constexpr std::string_view kThoughtEnds = "</think>";
constexpr std::string_view kPlaceholder = "\uFDD2";  // stands for a message that is being located

// The kind of each byte of a rendered text; `never`: no target, even without responses_only.
enum class Mark : uint8_t { none, response, never };

// Splits at the delimiters of special tokens' names.
void cut(std::string_view text, Mark mark, const std::string& what, std::vector<Segment>& out) {
  for (bool plain = false; !text.empty(); plain = !plain) {
    const size_t end = text.find(plain ? kCloses : kOpens), other = text.find(plain ? kOpens : kCloses);
    if ((plain && end == std::string_view::npos) || other < end)
      throw InputError(what + ": the chat template prints only part of a special token's name in a message");
    if (end != 0)
      out.push_back({plain ? Segment::Kind::text : Segment::Kind::marker, std::string(text.substr(0, end)),
                     mark == Mark::response, mark == Mark::never});
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + kOpens.size());
  }
}

}  // namespace

ModelTemplate::ModelTemplate(const Tokenizer& tokenizer)
    : template_(tokenizer.chat_template(), "chat_template"), variables_(tokenizer.named_tokens()) {
  for (int64_t i = 0; i < tokenizer.vocab_size(); ++i) {
    const auto token = static_cast<int32_t>(i);
    const std::string name = tokenizer.token_bytes(token);
    if (tokenizer.special(name) == token && tokenizer.encode(name) != std::vector{token})
      special_.add(name, {.token = token});
  }
}

// Encloses names of special tokens in delimiters.
std::string ModelTemplate::quoted(const std::string& text) const {
  if (text.find(kOpens) != std::string::npos || text.find(kCloses) != std::string::npos)
    throw InputError("a message contains a noncharacter, U+FDD0 or U+FDD1");
  std::string out;
  special_.split(text, true, [&](std::string_view segment, int32_t token) {
    out += token < 0 ? std::string(segment) : fmt::format("{}{}{}", kOpens, segment, kCloses);
  });
  return out;
}

jinja::Value ModelTemplate::to_jinja(jinja::RenderContext& work, const nlohmann::ordered_json& json) const {
  if (json.is_string()) return quoted(json.get<std::string>());
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_float()) return json.get<double>();
  if (json.is_number_unsigned() && json.get<uint64_t>() > INT64_MAX)
    bad_input("the integer {} is too large", json.dump());
  if (json.is_number()) return json.get<int64_t>();
  if (json.is_null()) return jinja::None{};
  jinja::Values items;
  jinja::Pairs pairs;
  for (const auto& [key, value] : json.items()) {
    items.push_back(to_jinja(work, value));
    if (json.is_object()) pairs.emplace_back(quoted(key), items.back());
  }
  return json.is_array() ? make_sequence(work, std::move(items)) : make_dict(work, pairs);
}

jinja::Rendered ModelTemplate::text(std::span<const Message> turns, const std::string& more, bool asks,
                                    const std::string& what) const {
  using namespace jinja;
  RenderContext work;
  try {
    const auto add = [&](auto& to, const std::string& json) {
      const auto all = json.empty() ? nlohmann::ordered_json::object() : nlohmann::ordered_json::parse(json);
      for (const auto& [key, value] : all.items()) to.emplace_back(key, to_jinja(work, value));
    };
    Values messages;
    for (const Message& turn : turns) {
      Pairs message{{"role", std::string(to_string(turn.role))}};
      if (!turn.silent) message.emplace_back("content", quoted(turn.text));
      add(message, turn.more);
      messages.push_back(make_dict(work, message));
    }
    Variables variables{{"messages", make_sequence(work, std::move(messages))},
                        {"tools", None{}},
                        {"documents", None{}},
                        {"add_generation_prompt", asks}};
    for (const auto& [name, token] : variables_) variables.emplace_back(name, token);
    add(variables, more);
    return template_.render(work, variables);
  } catch (const InputError& e) {
    bad_input("{}: {}", what, e.what());
  }
}

// Excludes white space after a final special token.
size_t ModelTemplate::turn_size(std::string_view with_turn, size_t begin) const {
  const std::string_view bare = jinja::stripped(with_turn, false, true);
  bool ends = false;
  special_.split(bare, true, [&](std::string_view, int32_t token) { ends = token >= 0; });
  return std::max(begin, ends ? bare.size() : with_turn.size()) - begin;
}

// Bytes at the beginning of `rest`, the text after a message, that belong to its turn. `last` is the text after the
// message in a final turn. A special token at which `rest` first deviates from `last` still belongs to the turn if
// `last` contains none before that position (gpt-oss, Phi-3).
size_t ModelTemplate::closing_size(std::string_view last, std::string_view rest) const {
  size_t size = 0;
  bool marked = false, done = false;
  special_.split(last, true, [&](std::string_view segment, int32_t token) {
    done = done || !rest.substr(size).starts_with(segment);
    if (!done) return void((size += segment.size(), marked |= token >= 0));
    if (!std::exchange(marked, true) && token >= 0)
      special_.split(rest.substr(size), true, [&, first = true](std::string_view other, int32_t its) mutable {
        if (std::exchange(first, false) && its >= 0) size += other.size();
      });
  });
  return turn_size(rest.substr(0, size), 0);
}

// Locates a turn if the first turns' rendering is not a prefix of the full text (Qwen3 shows an empty thought only in
// the last turn), using a rendering with a placeholder instead of the message. The turn begins after the generation
// prompt, as far as the full text contains it, and ends with the text that the template prints after the message.
std::pair<size_t, size_t> ModelTemplate::locate(const Example& example, size_t i, std::string_view full,
                                                std::string_view before, const std::string& what) const {
  const auto refuse = [&](const char* why) {
    bad_input(
        "{}: message {}: the chat template prints its text {}; expected once and unmodified, or generation blocks "
        "in the template",
        what, i + 1, why);
  };
  std::vector<Message> turns = example.turns;
  const bool silent = std::exchange(turns[i].silent, false);
  std::string& changed = turns[i].text;
  const size_t thought = changed.rfind(kThoughtEnds);  // a thought stays in the text, since templates move it
  const size_t from = thought == std::string::npos ? 0 : changed.find_first_not_of('\n', thought + kThoughtEnds.size());
  const std::string own = quoted(changed.substr(std::min(from, changed.size())));
  changed.resize(std::min(from, changed.size())), changed += kPlaceholder;
  const auto around = [&](size_t count) {
    const std::string out = text(std::span(turns).first(count), example.variables, false, what).text;
    const size_t at = out.find(kPlaceholder);
    if (at == std::string::npos) refuse("never");
    if (out.find(kPlaceholder, at + 1) != std::string::npos) refuse("more than once");
    return std::pair(out.substr(0, at), out.substr(at + kPlaceholder.size()));
  };
  auto [head, rest] = around(turns.size());
  std::string tail = around(i + 1).second;
  // Without text, no line break precedes tool calls.
  for (std::string* const text : {&rest, &tail})
    if (silent) *text = jinja::stripped(*text, true, false);
  if (!full.starts_with(head) || !full.ends_with(rest) || full.size() < head.size() + rest.size())
    refuse("in a form that depends on its content");
  const size_t end = full.size() - rest.size();
  const std::string_view found = full.substr(head.size(), end - head.size());
  const size_t closing = closing_size(tail, rest);
  if (own.find(found) == std::string::npos || (closing == 0 && !tail.empty()))
    refuse("in a form that depends on its content");
  const std::string asked = i == 0 ? "" : text(std::span(turns).first(i), example.variables, false, what).text;
  size_t begin = head.size();
  if (full.starts_with(before)) {
    begin = before.size();
  } else if (full.starts_with(asked) && before.starts_with(asked)) {
    begin = static_cast<size_t>(std::ranges::mismatch(full, before).in1 - full.begin());
  } else if (const std::string_view marker = before.substr(std::min(asked.size(), before.size()));
             !marker.empty() && before.starts_with(asked)) {
    const size_t at = head.rfind(marker);
    if (at != std::string::npos) begin = at + marker.size();
  }
  return {std::min(begin, head.size()), end + closing};
}

std::vector<Segment> ModelTemplate::render(const Example& example, const std::string& what, bool responses) const {
  const std::span<const Message> all(example.turns);
  const jinja::Rendered full = text(all, example.variables, false, what);
  std::vector<Mark> marks(full.text.size(), Mark::none);
  const auto mark = [&](size_t begin, size_t end, Mark by) {
    std::fill(marks.begin() + static_cast<std::ptrdiff_t>(begin), marks.begin() + static_cast<std::ptrdiff_t>(end), by);
  };
  for (const auto& [begin, end] : full.generated) mark(begin, end, Mark::response);
  for (size_t i = 0; i < all.size(); ++i) {
    const bool answer = all[i].role == Role::assistant, never = all[i].training == Message::Training::never;
    // Other roles' turns are located only if a `generation` block marks them as responses.
    if (responses ? !answer || (!never && all[i].is_response() != full.generated.empty()) : !never) continue;
    const std::string before = i == 0 && !answer ? "" : text(all.first(i), example.variables, answer, what).text;
    const std::string with_turn =
        i + 1 == all.size() ? full.text : text(all.first(i + 1), example.variables, false, what).text;
    std::pair<size_t, size_t> turn{before.size(), before.size() + turn_size(with_turn, before.size())};
    if (!with_turn.starts_with(before) || !full.text.starts_with(with_turn))
      turn = locate(example, i, full.text, before, what);
    mark(turn.first, turn.second, never ? Mark::never : all[i].is_response() ? Mark::response : Mark::none);
  }
  std::vector<Segment> out;
  for (size_t at = 0, end = 0; at < marks.size(); at = end) {
    while (end < marks.size() && marks[end] == marks[at]) ++end;
    cut(std::string_view(full.text).substr(at, end - at), marks[at], what, out);
  }
  return out;
}

std::vector<Segment> ModelTemplate::prompt(const std::vector<Message>& turns, const std::string& what) const {
  std::vector<Segment> out;
  cut(text(turns, "", true, what).text, Mark::none, what, out);
  return out;
}

}  // namespace tessera
