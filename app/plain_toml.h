// What of TOML a configuration may use: KEY = VALUE on every line, strings of one line, and comments.
//
// Checked before toml++ parses the text. Its parser (3.3) breaks its own assertions on some malformed tables, dates,
// times and numbers, leaves what C++ defines on some letters outside strings and behind the last backslash of a line,
// and runs out of stack on a key of very many dots; none of that can be in what passes here.
#pragma once
#include <string>
#include <string_view>

namespace tessera {

// Throws Error (usage) with line and column for a table, a list, a date, a time, a string of several lines, a value
// without quotes that is neither a number nor a word, and for a quote or a byte beyond ASCII where no string or comment
// has it. Anything else that is wrong is left for the parser to say.
void check_plain_toml(std::string_view toml, const std::string& path);

}  // namespace tessera
