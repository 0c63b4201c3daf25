// Unicode's normal form C: one spelling for every character that has several.
#pragma once
#include <string>
#include <string_view>

namespace tessera::hub {

// The text, which is UTF-8, in normal form C (Unicode Standard Annex 15). Cost: one pass; n log n in the marks that
// stand on one letter.
std::string to_nfc(std::string_view text);

}  // namespace tessera::hub
