// A model's own template of chats, as its tokenizer brings it along, run on examples and on prompts.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "data/jinja/template.h"
#include "data/jsonl.h"
#include "data/tokenizer.h"

namespace tessera {

class ModelTemplate {
 public:
  // Throws InputError naming the line of the template that is not known, or wrong.
  explicit ModelTemplate(const Tokenizer& tokenizer);

  // The pieces of a conversation: in a marker the names of special tokens mean these, in a text they are text, since a
  // message has them. A response is what `generation` blocks print, or else what a turn of the assistant adds to the
  // text that asks for it, without blanks behind a special token at its end. Throws InputError, naming `what`, where
  // the template refuses, and where its text for the first turns is not the beginning of that for all of them.
  std::vector<Piece> render(const std::vector<Message>& turns, const std::string& what) const;
  // The pieces of the text that asks the assistant for the next turn.
  std::vector<Piece> prompt(const std::vector<Message>& turns, const std::string& what) const;

 private:
  struct Run;
  jinja::Value message_of(jinja::Work& work, const Message& turn, const std::string& what) const;
  void cut(std::string_view text, bool response, const std::string& what, std::vector<Piece>& out) const;
  size_t response_end(std::string_view text) const;

  jinja::Template template_;
  std::vector<std::pair<std::string, std::string>> variables_;  // names of tokens, such as bos_token
  std::vector<std::string> special_;                            // names of special tokens, the longest first
  std::string begins_;                                          // their first bytes
};

}  // namespace tessera
