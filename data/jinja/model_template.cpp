// From turns to pieces.
#include "data/jinja/model_template.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

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

std::vector<std::pair<std::string, std::string>> named_tokens(const Tokenizer& tokenizer) {
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
  return {out.begin(), out.end()};
}

std::string_view name_of_role(Role role) {
  return role == Role::system ? "system" : role == Role::user ? "user" : "assistant";
}

}  // namespace

// One conversation's texts.
struct ModelTemplate::Run {
  const ModelTemplate& of;
  const std::string& what;
  jinja::Work kept;
  jinja::Values messages;

  Run(const ModelTemplate& t, const std::vector<Message>& turns, const std::string& w) : of(t), what(w) {
    for (const Message& turn : turns) messages.push_back(of.message_of(kept, turn, what));
  }
  jinja::Template::Rendered first(size_t turns, bool asks) {
    using namespace jinja;
    Work work;
    Values some(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(turns));
    Variables variables{{"messages", sequence_of(work, std::move(some))},
                        {"tools", None{}},
                        {"documents", None{}},
                        {"add_generation_prompt", asks}};
    for (const auto& [name, token] : of.variables_) variables.emplace_back(name, token);
    try {
      return of.template_.render(work, variables);
    } catch (const InputError& e) {
      throw InputError(fmt::format("{}: {}", what, e.what()));
    }
  }
};

ModelTemplate::ModelTemplate(const Tokenizer& tokenizer)
    : template_(tokenizer.chat_template(), "chat_template"),
      variables_(named_tokens(tokenizer)),
      special_(special_names(tokenizer)) {
  for (const std::string& name : special_) begins_ += name.front();
}

jinja::Value ModelTemplate::message_of(jinja::Work& work, const Message& turn, const std::string& what) const {
  if (turn.text.find(kOpens) != std::string::npos || turn.text.find(kCloses) != std::string::npos)
    throw InputError(what + ": a message has U+FDD0 or U+FDD1, which are no characters");
  std::string text;
  for (size_t at = 0; at < turn.text.size();) {
    const size_t next = std::min(turn.text.find_first_of(begins_, at), turn.text.size());
    text.append(turn.text, std::exchange(at, next), next - at);
    const auto found = std::ranges::find_if(
        special_, [&](const std::string& name) { return turn.text.compare(at, name.size(), name) == 0; });
    const size_t size = found == special_.end() ? std::min<size_t>(turn.text.size() - at, 1) : found->size();
    const std::string_view part = std::string_view(turn.text).substr(at, size);
    found == special_.end() ? text += part : ((text += kOpens) += part) += kCloses;
    at += size;
  }
  using jinja::Value;
  return jinja::dict_of(
      work, {{Value("role"), Value(std::string(name_of_role(turn.role)))}, {Value("content"), Value(text)}});
}

std::vector<Piece> ModelTemplate::render(const std::vector<Message>& turns, const std::string& what) const {
  Run run(*this, turns, what);
  const jinja::Template::Rendered whole = run.first(turns.size(), false);
  std::vector<std::pair<size_t, size_t>> responses = whole.generated;
  for (size_t i = 0; i < turns.size() && whole.generated.empty(); ++i) {
    if (turns[i].role != Role::assistant) continue;
    const std::string asked = run.first(i, true).text;
    const std::string said = i + 1 == turns.size() ? whole.text : run.first(i + 1, false).text;
    if (!said.starts_with(asked) || !whole.text.starts_with(said))
      throw InputError(
          fmt::format("{}: message {}: the chat template's text {} is not how its text goes on; expected "
                      "one that only grows from turn to turn, or generation blocks in the template",
                      what, i + 1, said.starts_with(asked) ? "up to it" : "before it"));
    responses.emplace_back(asked.size(), asked.size() + response_end(std::string_view(said).substr(asked.size())));
  }
  std::vector<Piece> out;
  size_t at = 0;
  const auto cut_to = [&](size_t end, bool response) {
    cut(std::string_view(whole.text).substr(at, end - at), response, what, out);
    at = end;
  };
  for (const auto& [begin, end] : responses) cut_to(begin, false), cut_to(end, true);
  cut_to(whole.text.size(), false);
  return out;
}

std::vector<Piece> ModelTemplate::prompt(const std::vector<Message>& turns, const std::string& what) const {
  std::vector<Piece> out;
  cut(Run(*this, turns, what).first(turns.size(), true).text, false, what, out);
  return out;
}

size_t ModelTemplate::response_end(std::string_view text) const {
  const std::string_view said = jinja::stripped(text, false, true);
  const bool ends = std::ranges::any_of(special_, [&](const std::string& name) { return said.ends_with(name); });
  return ends ? said.size() : text.size();
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
