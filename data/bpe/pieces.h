// Cuts a text into the pieces inside which byte pairs are merged, by the patterns that the field uses.
//
// GPT-2's: a piece is an English contraction's ending ('s 't 're 've 'm 'll 'd), or one of: letters, numbers, other
// visible characters, each with at most one space before it, or white space (without the last space before a word).
// Letters and numbers are Unicode's classes L and N; white space is Unicode's property, spelled out, since PCRE2's \s
// counts U+180E too. Bytes that are not UTF-8 are a piece of their own for each unbroken run of them.
// Source: Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.2; the other patterns
// are those of the tokenizer.json of Llama 3 and Qwen 2, and what the library `tokenizers` calls Digits.
#pragma once
#include <functional>
#include <optional>
#include <string_view>

namespace tessera::bpe {

enum class Pattern { gpt2, llama3, qwen, each_digit, digits };

// The pattern that a tokenizer.json writes so; nothing for any other. A pattern from a file is never run, only
// recognised: so none can backtrack for ever.
std::optional<Pattern> pattern_written(std::string_view regex);

// Calls f(piece) for every piece of a text, in order; together they are the text, whatever its bytes. Cost: one pass,
// about 10 ns a byte.
void for_each_piece(std::string_view text, const std::function<void(std::string_view)>& f,
                    Pattern pattern = Pattern::gpt2);

}  // namespace tessera::bpe
