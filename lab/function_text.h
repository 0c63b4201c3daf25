// Functions in the text of a source file: where a body is, and the file with bodies blanked.
#pragma once
#include <string>
#include <string_view>

#include "lab/exercise.h"

namespace tessera::lab {

// Bytes [begin, end) of a text.
struct Part {
  size_t begin = 0, end = 0;
};

// What is blanked: whole lines between the braces of the function's definition. Throws Error (usage) where the text has
// no such function, or two.
Part blanked_part(std::string_view source, const Blank& blank);

// The file as a learner gets it: each blanked part is a comment and a call of not_yet().
std::string blanked_file(std::string_view source, const Exercise& exercise);

// The file with other bodies, one for each blank and in their order: what a solution, or a mistake, would look like.
std::string filled_file(std::string_view source, const Exercise& exercise, const std::vector<std::string>& bodies);

}  // namespace tessera::lab
