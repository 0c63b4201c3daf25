// Conversations with a model: what was said, and what is said next.
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>

#include "app/generate/inference.h"
#include "parallel/comm/launch.h"
#include "tensor/error.h"

namespace tessera {

Conversation::Conversation(const GenerateOptions& o, const Tokenizer& tokenizer, int64_t vocab)
    : tokenizer_(tokenizer), how_{.style = o.chat_template, .ends = !o.no_bos, .special = o.special, .vocab = vocab} {
  if (o.chat && (!o.prompts.empty() || o.prompts_file))
    throw Error("--chat: takes its turns from standard input; expected no --prompt and no --prompts");
  if (!has_template() && (o.chat || o.system)) how_.style = ChatTemplate::automatic;
  if (has_template()) ask({}, how_, tokenizer_);
  if (o.system) turns_.push_back({Role::system, *o.system});
}

Asked Conversation::asked(const std::string& prompt) const {
  std::vector<Message> turns = turns_;
  turns.push_back({Role::user, prompt});
  return ask(turns, how_, tokenizer_);
}

void Conversation::add(const std::string& prompt, const std::string& answer) {
  turns_.push_back({Role::user, prompt});
  turns_.push_back({Role::assistant, answer});
}

std::optional<std::string> next_line(Communicator& world) {
  std::string line;
  const bool typed = ::isatty(STDIN_FILENO) == 1;
  while (world.rank() == 0 && line.empty()) {
    if (typed) std::fputs("> ", stderr);
    const bool more = static_cast<bool>(std::getline(std::cin, line));
    if (typed && !more) std::fputs("\n", stderr);
    if (!more) break;
    if (line.ends_with('\r')) line.pop_back();
  }
  if (world.size() > 1) line = broadcast_text(world, line, 0);
  return line.empty() ? std::nullopt : std::optional(line);
}

}  // namespace tessera
