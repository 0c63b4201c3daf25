// Text from tokens, one after another, without broken characters.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "data/tokenizer.h"

namespace tessera {

// A token may end inside a character of several bytes: those bytes wait for the tokens that bring the rest. What can
// never become a character is shown as U+FFFD for programs, or by its bytes, `\xe9`, for people, so that everything
// that comes out is UTF-8. The text is taken to go on behind a prompt. The tokenizer must outlive this.
class StreamDecoder {
 public:
  enum class Broken { replaced, escaped };
  explicit StreamDecoder(const Tokenizer& tokenizer, Broken broken = Broken::replaced)
      : tokenizer_(&tokenizer), broken_(broken) {}

  // The characters that are whole after this token; maybe none. Throws Error (usage) as decode() does.
  std::string add(int32_t token);
  // Of what still waits, at the end of the text: what stands for it, or nothing.
  std::string end();

 private:
  std::string shown(std::string_view bytes) const;

  const Tokenizer* tokenizer_;
  Broken broken_;
  std::string waiting_;  // the beginning of a character
};

}  // namespace tessera
