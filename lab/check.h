// Giving exercises out, and building and grading what comes back. Both need the build folder of a checkout, in which
// this program was built: its sources, libraries and commands are what an exercise is made of.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>

#include "lab/exercise.h"

namespace tessera::lab {

// Writes the exercise's file, README.md and compile_commands.json (for editors) into a new or empty folder. Throws
// Error (usage) where the folder has something in it, OutputError, or what check() throws where there is no build.
void give_out(const Exercise& exercise, const std::filesystem::path& folder);

// Compiles the learner's file, links it into `folder`/build/tessera before the product's libraries, and lets that
// program grade itself. Takes seconds. Throws InputError where the folder has no such file; Error (usage) where there
// is no build folder or no compiler to be found.
Verdict check(const Exercise& exercise, const std::filesystem::path& folder);

// Limits the memory of this process, before it grades, to two GiB more than it has, so that a loop without an end does
// not take all of the machine's.
void limit_memory();

// Functions in the text of a source file: where a body is, and the file with bodies blanked.

// Bytes [begin, end) of a text.
struct Part {
  size_t begin = 0, end = 0;
};

// The blanked part: whole lines between the braces of the function's definition. Throws Error (usage) where the text
// has no such function, or two.
Part blanked_part(std::string_view source, const Blank& blank);

// The file as a learner gets it: each blanked part is a comment and a call of not_yet().
std::string blanked_file(std::string_view source, const Exercise& exercise);

// The file with other bodies, one for each blank and in their order: what a solution, or a mistake, would look like.
std::string filled_file(std::string_view source, const Exercise& exercise, const std::vector<std::string>& bodies);

}  // namespace tessera::lab
