// A sample of text, cut where a reader would begin and end.
#pragma once
#include <string>

namespace tessera {

// The whole sentences of a text: from the first that begins in it to the end of the last. A sentence ends with . ! or ?
// and maybe a quotation mark, and the next begins with a capital behind a space. All of the text where that leaves less
// than a third: not every text has sentences.
std::string whole_sentences(const std::string& text);

}  // namespace tessera
