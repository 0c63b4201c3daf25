// Jinja chat templates of models, evaluated as in transformers.
//
//   const jinja::Template t("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}", "file");
//   jinja::RenderContext work;
//   t.render(work, {{"messages", messages}}).text
//
// Supported: the statements if, for (not recursive), set, macro and generation; Jinja's operators except ** and string
// formatting by %; mappings with string keys; the tables of builtins.cpp; Jinja's rules for white space (trim_blocks,
// lstrip_blocks), undefined values and the sandbox (only namespaces are mutable). Anything else is rejected with its
// line. Case mapping is per character except for the sharp s of `upper`; integers have 64 bits.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/chat_template.h"
#include "data/jinja/value.h"
#include "data/tokenizer/described.h"

namespace tessera {
namespace jinja {

using Variables = Pairs;
enum class Flow : uint8_t { on, broken, continued };
using Step = std::function<Flow(RenderContext&)>;

class Template {
 public:
  // Throws InputError naming the line.
  Template(std::string_view source, std::string what);

  // `work` owns the variables' values and serves one rendering. Throws InputError, which names the line, if Jinja would
  // throw, for unsupported features, and at the work limit.
  Rendered render(RenderContext& work, const Variables& variables) const;

 private:
  std::string what_;
  Step body_;
};

}  // namespace jinja

// A tokenizer's chat template, applied to examples and prompts.
class ModelTemplate {
 public:
  // Throws InputError as Template does.
  explicit ModelTemplate(const Tokenizer& tokenizer);

  // In a marker, names of special tokens denote these tokens; in a message they are plain text. The response is the
  // output of `generation` blocks or, without any, the text that an assistant's turn adds to the generation prompt,
  // without white space after a final special token. Without `responses`, only turns of weight 0 are located. If the
  // first turns' rendering is not a prefix of the full rendering, a turn is located by its message's text. Throws
  // InputError if the template raises an error, or if a turn to be located is missing, modified or printed twice.
  std::vector<Segment> render(const Example& example, const std::string& what, bool responses = true) const;
  // The conversation, followed by the generation prompt of the next assistant turn.
  std::vector<Segment> prompt(const std::vector<Message>& turns, const std::string& what) const;

 private:
  jinja::Rendered text(std::span<const Message> turns, const std::string& variables, bool asks,
                       const std::string& what) const;
  size_t turn_size(std::string_view with_turn, size_t begin) const;
  size_t closing_size(std::string_view last, std::string_view rest) const;
  std::pair<size_t, size_t> locate(const Example& example, size_t i, std::string_view full, std::string_view before,
                                   const std::string& what) const;
  std::string quoted(const std::string& text) const;
  jinja::Value to_jinja(jinja::RenderContext& work, const nlohmann::ordered_json& json) const;

  jinja::Template template_;
  std::map<std::string, std::string> variables_;  // token names, such as bos_token
  hub::AddedTokens special_ = {};                 // remain plain text in messages
};

}  // namespace tessera
