// Giving exercises out, and building and grading what comes back. Both need the build folder of a checkout, in which
// this program was built: its sources, libraries and commands are what an exercise is made of.
#pragma once
#include <filesystem>

#include "lab/exercise.h"

namespace tessera::lab {

// Writes the exercise's file, README.md and compile_commands.json (for editors) into a new or empty folder. Throws
// Error (usage) where the folder has something in it, OutputError, or what check() throws where there is no build.
void give_out(const Exercise& exercise, const std::filesystem::path& folder);

// Compiles the learner's file, links it into `folder`/build/tessera before the product's libraries, and lets that
// program grade itself. Takes seconds. Throws InputError where the folder has no such file; Error (usage) where there
// is no build folder or no compiler to be found.
Verdict check(const Exercise& exercise, const std::filesystem::path& folder);

// Of this process, before it grades: two GiB more than it has, so that a loop without an end does not take all of them.
void limit_memory();

}  // namespace tessera::lab
