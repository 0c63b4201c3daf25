// Texts known by name, which are part of the program.
#pragma once
#include <optional>
#include <string_view>

#include "data/text.h"

namespace tessera {

// The text of a known name, or nothing for another name:
//   austen           Jane Austen's six novels, one document each
//   tinyshakespeare  the text of char-rnn and nanoGPT: scenes of Shakespeare's plays, one document
// Both are in the public domain; docs/data.md has their sources. They lie compressed in data/texts/, and in every
// program that links this function (1.5 MB). Throws Error when the program's own bytes are damaged. Cost: unpacking, 10
// ms.
std::optional<Text> known_text(std::string_view name);

}  // namespace tessera
