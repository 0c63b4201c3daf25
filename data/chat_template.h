// How an example becomes one text: what stands around the turns of a conversation, and which of it is the response.
//
//   chatml   <|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n[So.<|im_end|>]\n
//   llama3   <|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHow?<|eot_id|>
//            <|start_header_id|>assistant<|end_header_id|>\n\n[So.<|eot_id|>]             (no line break between)
//   alpaca   Below is an instruction ...\n\n### Instruction:\nHow?\n\n### Response:\n[So.END]
//   none     How?[So.END]
//
// In brackets the response. END is the tokenizer's own end of a text. A text has no turns: it is all response, and END.
// Sources: OpenAI's ChatML; Meta's Llama 3 model card; Taori et al. 2023, with a line break before the response, as is
// usual today.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/jsonl.h"

namespace tessera {

enum class ChatTemplate : uint8_t { automatic, chatml, llama3, alpaca, none };

struct Piece {
  // A marker is one special token of the tokenizer; `end` its own end of a text.
  enum class Kind : uint8_t { text, marker, end };
  Kind kind = Kind::text;
  std::string text = {};
  bool response = false;
};

// Throws InputError, naming `what`, for an example that the template has no form for: messages without one. `automatic`
// is chatml for messages, alpaca for instructions, and none for the rest.
std::vector<Piece> render(const Example& example, ChatTemplate style, const std::string& what);

// The built-in template that a model's own, in Jinja, says the same as; nothing where it is none of them.
std::optional<ChatTemplate> recognised(std::string_view jinja);

}  // namespace tessera
