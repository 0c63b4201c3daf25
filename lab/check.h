// Giving exercises out, and building and grading what comes back. Both need the build folder of a checkout, in which
// this program was built: its sources, libraries and commands are what an exercise is made of.
#pragma once
#include <filesystem>
#include <map>

#include "lab/puzzle.h"

namespace tessera::lab {

// Writes the exercise's file, the headers that its page names, README.md and compile_commands.json (for editors) into a
// new or empty folder. Throws Error (usage) where the folder has something in it, OutputError, or what check() throws
// where there is no build.
void give_out(const Exercise& exercise, const std::filesystem::path& folder);

constexpr int kGradingSeconds = 30;  // a learner's program may take; graders take less than one

// Compiles the learner's file, links it into `folder`/build/tessera in the place of the product's, and asks that
// program. Takes seconds. Throws InputError where the folder has no such file; Error
// (usage) where there is no build folder or no compiler to be found.
Verdict check(const Exercise& exercise, const std::filesystem::path& folder, int seconds = kGradingSeconds);

// Grades a program as check() has linked it, in a process that is confined (lab/learner.cpp); what it prints goes to
// the file `output`, at most a MiB. Throws Error where no process can be started or confined.
Verdict grade_program(const Exercise& exercise, const std::filesystem::path& program,
                      const std::filesystem::path& output, int seconds = kGradingSeconds);
// The learner's side of it: answers until nothing more is asked. Throws Error (usage) where nobody asks.
void answer(const Exercise& exercise);

// An exercise, or a puzzle, that was handed in: files of that name, or a puzzle's task.txt, are looked for in a
// learner's folder, and in folders there.
struct Submission {
  const Exercise* exercise = nullptr;
  const Puzzle* puzzle = nullptr;
  std::filesystem::path folder;
};
// The learners of a class, each of whom has a folder. Throws InputError where there is no such folder.
std::map<std::string, std::vector<Submission>> handed_in(const std::filesystem::path& folder);

// Functions in the text of a source file: where a body is, and the file with bodies blanked.

// Bytes [begin, end) of a text.
struct Part {
  size_t begin = 0, end = 0;
};

// The blanked part: whole lines between the braces of the function's definition. Throws Error (usage) where the text
// has no such function, or two.
Part blanked_part(std::string_view source, const Blank& blank);

// A text without comments, and without blanks outside of strings: what two writers of the same code share.
std::string without_blanks(std::string_view text);

// The file as a learner gets it: each blanked part is a comment and a call of not_yet().
std::string blanked_file(std::string_view source, const Exercise& exercise);

// The file with other bodies, one for each blank and in their order: what a solution, or a mistake, would look like.
std::string filled_file(std::string_view source, const Exercise& exercise, const std::vector<std::string>& bodies);

}  // namespace tessera::lab
