// A chat template, rendered for a small conversation: yields a text or a one-line error, with bounded work.
#include <string>
#include <string_view>

#include "data/jinja/template.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("template", [](std::string_view bytes) {
  using namespace jinja;
  const Template made(bytes, kWhat);
  RenderContext work(size_t{1} << 22);
  const auto message = [&](const char* role, const char* content) {
    return make_dict(work, {{"role", std::string(role)}, {"content", std::string(content)}});
  };
  const Value messages = make_sequence(work, {message("user", " How? "), message("assistant", "So é.\n")});
  const Rendered out = made.render(work, {{"messages", messages},
                                          {"tools", None{}},
                                          {"add_generation_prompt", true},
                                          {"bos_token", std::string("<s>")},
                                          {"eos_token", std::string("</s>")}});
  size_t at = 0;
  for (const auto& [begin, end] : out.generated) {
    require(begin >= at && end >= begin && end <= out.text.size(), "generated spans are in the text, in order");
    at = end;
  }
});

}  // namespace tessera::fuzz
