// Templates of chats, in Jinja, which models bring along: run as transformers runs them.
//
//   const jinja::Template t("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}", "file");
//   jinja::Work work;
//   t.render(work, {{"messages", messages}}).text
//
// Known are the statements if, for (else, if, break, continue; not recursive), set, macro, call, filter, with, raw and
// generation; Jinja's operators; the filters, tests, functions and methods that builtins.cpp lists; its rules for
// blanks (trim_blocks, lstrip_blocks), for what is undefined, and the sandbox's: nothing is changed but a namespace.
// Anything else is refused with its line. Letters change case one by one, but for the sharp s of `upper`; integers have
// 64 bits.
#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/jinja/syntax.h"
#include "data/jinja/value.h"

namespace tessera::jinja {

using Variables = std::vector<std::pair<std::string, Value>>;

class Template {
 public:
  // Throws InputError, naming `what` and the line.
  Template(std::string_view source, std::string what);

  struct Rendered {
    std::string text;
    std::vector<std::pair<size_t, size_t>> generated;  // begin and end of what `generation` blocks made
  };
  // The variables' values are kept by `work`. Throws InputError naming the line: for what Jinja throws, for what is not
  // known, and where the work has no end.
  Rendered render(Work& work, const Variables& variables) const;

 private:
  std::string what_;
  Syntax syntax_;
};

}  // namespace tessera::jinja
