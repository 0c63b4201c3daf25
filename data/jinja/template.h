// Templates of chats, in Jinja, which models bring along: run as transformers runs them.
//
//   const jinja::Template t("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}", "file");
//   jinja::Work work;
//   t.render(work, {{"messages", messages}}).text
//
// Known are the statements if, for (else, if, break, continue; not recursive), set, macro and generation; Jinja's
// operators but ** and % of a text; mappings whose keys are texts; the filters, tests, functions and methods that
// builtins.cpp lists; its rules for blanks (trim_blocks, lstrip_blocks), for what is undefined, and the sandbox's:
// nothing is changed but a namespace. Anything else is refused with its line. Letters change case one by one, but for
// the sharp s of `upper`; integers have 64 bits.
#pragma once

#include "data/jinja/value.h"
#include "data/jsonl.h"
#include "data/tokenizer/described.h"

namespace tessera {
namespace jinja {

using Variables = Pairs;
enum class Flow : uint8_t { on, broken, continued };
using Step = std::function<Flow(RenderContext&)>;

class Template {
 public:
  // Throws InputError, naming `what` and the line.
  Template(std::string_view source, std::string what);

  // The variables' values are kept by `work`, which renders once. Throws InputError naming the line: for what Jinja
  // throws, for what is not known, and where the work has no end.
  Rendered render(RenderContext& work, const Variables& variables) const;

 private:
  std::string what_;
  Step body_;
};

}  // namespace jinja

// A model's own template, as its tokenizer brings it along, run on examples and on prompts.
class ModelTemplate {
 public:
  // Throws InputError naming the line of the template that is not known, or wrong.
  explicit ModelTemplate(const Tokenizer& tokenizer);

  // The pieces of an example's messages: in a marker the names of special tokens mean these, in a text they are text,
  // since a message has them. A response is what `generation` blocks print, or else what a turn of the assistant adds
  // to the text that asks for it, without blanks behind a special token at its end; without `responses` only turns of
  // weight 0 are looked for. If the text for the first turns is not the beginning of that for all of them, the turn is
  // where the latter has the message's text. Throws InputError, naming `what`, where the template refuses, and where a
  // turn must be found and is printed never, more than once, or changed.
  std::vector<Piece> render(const Example& example, const std::string& what, bool responses = true) const;
  // The pieces of the text that asks the assistant for the next turn.
  std::vector<Piece> prompt(const std::vector<Message>& turns, const std::string& what) const;

 private:
  jinja::Rendered text(std::span<const Message> turns, const std::string& variables, bool asks,
                       const std::string& what) const;
  size_t turn_size(std::string_view said, size_t begin) const;
  size_t closing_size(std::string_view last, std::string_view rest) const;
  std::pair<size_t, size_t> locate(const Example& example, size_t i, std::string_view whole, std::string_view before,
                                   const std::string& what) const;
  std::string quoted(const std::string& text) const;
  jinja::Value to_jinja(jinja::RenderContext& work, const nlohmann::ordered_json& json) const;

  jinja::Template template_;
  std::map<std::string, std::string> variables_;  // names of tokens, such as bos_token
  hub::AddedTokens special_ = {};                 // those that stay text in a text
};

}  // namespace tessera
