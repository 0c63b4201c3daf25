// A file of examples, possibly compressed: rows, shapes and templates. Every valid example renders in each template but
// one, with a response.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/chat_template.h"
#include "data/json_rows.h"
#include "data/jsonl.h"
#include "data/text.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const Target target("examples", [](std::string_view bytes) {
  std::string text;
  unpack_text(bytes, kWhat, [&](std::string_view chunk) { text += chunk; });
  for_each_line(text, kWhat, [](std::string_view line, int64_t number) {
    const std::string where = std::string(kWhat) + ":" + std::to_string(number);
    const Example example = parse_example(line, where);
    if (example.shape == Example::Shape::tokens) return;
    for (const ChatTemplate style :
         {ChatTemplate::automatic, ChatTemplate::chatml, ChatTemplate::llama3, ChatTemplate::alpaca}) {
      const std::vector<Segment> segments = render(example, style, where);
      const bool answers = std::ranges::any_of(example.turns, &Message::is_response);
      require(std::ranges::any_of(segments, &Segment::response) == answers, "the assistant's text is the response");
    }
  });
});

}  // namespace tessera::fuzz
