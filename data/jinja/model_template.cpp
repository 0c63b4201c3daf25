// From turns to pieces.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "data/jinja/template.h"
#include "data/json.h"

namespace tessera {
namespace {

// Noncharacters of Unicode stand around a special token's name in a message while the template runs.
constexpr std::string_view kOpens = "\uFDD0", kCloses = "\uFDD1";

std::vector<std::string> special_names(const Tokenizer& tokenizer) {
  std::vector<std::string> out;
  for (int64_t i = 0; i < tokenizer.vocab_size(); ++i) {
    const auto token = static_cast<int32_t>(i);
    std::string name = tokenizer.bytes_of(token);
    if (tokenizer.special(name) == token && tokenizer.encode(name) != std::vector{token})
      out.push_back(std::move(name));
  }
  std::ranges::sort(out, std::ranges::greater(), &std::string::size);
  return out;
}

std::map<std::string, std::string> named_tokens(const Tokenizer& tokenizer) {
  std::map<std::string, std::string> out;
  const auto files = tokenizer.files();
  for (const char* const file : {"special_tokens_map.json", "tokenizer_config.json"}) {
    const auto found = files.find(file);
    if (found == files.end()) continue;
    const nlohmann::json config = parse_json(found->second, file, JsonFile::others);
    for (const char* const key :
         {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}) {
      const nlohmann::json& value = value_at(config, key);
      const nlohmann::json& name = value.is_object() ? value_at(value, "content") : value;
      if (name.is_string()) out[key] = name.get<std::string>();
    }
  }
  return out;
}

// A message's text, with what would be special tokens marked as text.
std::string quoted(const std::string& text, const std::vector<std::string>& special, const std::string& begins) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t next = std::min(text.find_first_of(begins, at), text.size());
    out.append(text, std::exchange(at, next), next - at);
    const auto found = std::ranges::find_if(
        special, [&](const std::string& name) { return text.compare(at, name.size(), name) == 0; });
    const std::string part = text.substr(at, found == special.end() ? 1 : found->size());
    out += found == special.end() ? part : fmt::format("{}{}{}", kOpens, part, kCloses);
    at += part.size();
  }
  return out;
}

}  // namespace

ModelTemplate::ModelTemplate(const Tokenizer& tokenizer)
    : template_(tokenizer.chat_template(), "chat_template"),
      variables_(named_tokens(tokenizer)),
      special_(special_names(tokenizer)) {
  for (const std::string& name : special_) begins_ += name.front();
}

jinja::Rendered ModelTemplate::text(std::span<const Message> turns, bool asks, const std::string& what) const {
  using namespace jinja;
  constexpr std::array<const char*, 3> kRoles{"system", "user", "assistant"};
  Work work;
  Values messages;
  for (const Message& turn : turns) {
    if (turn.text.find(kOpens) != std::string::npos || turn.text.find(kCloses) != std::string::npos)
      throw InputError(what + ": a message has U+FDD0 or U+FDD1, which are no characters");
    const Value role = std::string(kRoles[static_cast<size_t>(turn.role)]);
    messages.push_back(
        dict_of(work, {{Value("role"), role}, {Value("content"), quoted(turn.text, special_, begins_)}}));
  }
  Variables variables{{"messages", sequence_of(work, std::move(messages))},
                      {"tools", None{}},
                      {"documents", None{}},
                      {"add_generation_prompt", asks}};
  for (const auto& [name, token] : variables_) variables.emplace_back(name, token);
  try {
    return template_.render(work, variables);
  } catch (const InputError& e) {
    throw InputError(fmt::format("{}: {}", what, e.what()));
  }
}

std::vector<Piece> ModelTemplate::render(const std::vector<Message>& turns, const std::string& what) const {
  const std::span all(turns);
  const jinja::Rendered whole = text(all, false, what);
  std::vector<std::pair<size_t, size_t>> responses = whole.generated;
  for (size_t i = 0; i < turns.size() && whole.generated.empty(); ++i) {
    if (turns[i].role != Role::assistant) continue;
    const std::string asked = text(all.first(i), true, what).text;
    const std::string said = i + 1 == turns.size() ? whole.text : text(all.first(i + 1), false, what).text;
    if (!said.starts_with(asked) || !whole.text.starts_with(said))
      throw InputError(
          fmt::format("{}: message {}: the chat template's text {} is not how its text goes on; expected "
                      "one that only grows from turn to turn, or generation blocks in the template",
                      what, i + 1, said.starts_with(asked) ? "up to it" : "before it"));
    const std::string_view bare = jinja::stripped(said, false, true);
    const bool ends = std::ranges::any_of(special_, [&](const std::string& name) { return bare.ends_with(name); });
    responses.emplace_back(asked.size(), std::max(asked.size(), ends ? bare.size() : said.size()));
  }
  std::vector<Piece> out;
  size_t at = 0;
  for (const auto& [begin, end] : responses) {
    cut(std::string_view(whole.text).substr(at, begin - at), false, what, out);
    cut(std::string_view(whole.text).substr(begin, end - begin), true, what, out);
    at = end;
  }
  cut(std::string_view(whole.text).substr(at), false, what, out);
  return out;
}

std::vector<Piece> ModelTemplate::prompt(const std::vector<Message>& turns, const std::string& what) const {
  std::vector<Piece> out;
  cut(text(turns, true, what).text, false, what, out);
  return out;
}

void ModelTemplate::cut(std::string_view text, bool response, const std::string& what, std::vector<Piece>& out) const {
  for (bool plain = false; !text.empty(); plain = !plain) {
    const size_t end = text.find(plain ? kCloses : kOpens);
    if (plain && end == std::string_view::npos)
      throw InputError(what + ": a message has a special token's name, of which the chat template prints a part");
    if (end != 0)
      out.push_back({plain ? Piece::Kind::text : Piece::Kind::marker, std::string(text.substr(0, end)), response});
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + kOpens.size());
  }
}

}  // namespace tessera
