// Chat templates: the text around the turns and the response of a conversation.
//
//   chatml   <|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n[So.<|im_end|>]\n
//   llama3   <|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHow?<|eot_id|>
//            <|start_header_id|>assistant<|end_header_id|>\n\n[So.<|eot_id|>]             (no line break between)
//   alpaca   Below is an instruction ...\n\n### Instruction:\nHow?\n\n### Response:\n[So.END]
//   none     How?[So.END]
//
// The response is in brackets; END is the tokenizer's end-of-text token. A text's response is the full text and END.
// Sources: OpenAI's ChatML; Meta's Llama 3 model card; Taori et al. 2023, with a line break before the response, as is
// common today.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/jsonl.h"

namespace tessera {

enum class ChatTemplate : uint8_t { automatic, chatml, llama3, alpaca, none };
constexpr std::array<std::string_view, 5> kChatTemplateNames = {"auto", "chatml", "llama3", "alpaca", "none"};
constexpr const auto& value_names(ChatTemplate) { return kChatTemplateNames; }

struct Segment {
  // marker: one special token; end: the tokenizer's end-of-text token.
  enum class Kind : uint8_t { text, marker, end };
  Kind kind = Kind::text;
  std::string text = {};
  bool response = false;
  bool never = false;       // never a target, even without responses_only
  bool is_content = false;  // from the example, not the template
};

// Throws InputError for messages in a template without roles, and for features that no built-in template supports.
// `automatic` is chatml for messages, alpaca for instructions and none otherwise.
std::vector<Segment> render(const Example& example, ChatTemplate style, const std::string& what);

// Empty if the style has none.
std::string_view jinja_source(ChatTemplate style);

}  // namespace tessera
