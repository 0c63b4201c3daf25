// Creates exercise directories; builds and grades submissions. Requires the sources, libraries and compile commands of
// the build that produced this program.
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "lab/puzzle.h"

namespace tessera::lab {

// Writes the blanked file, the headers named by its page, README.md and compile_commands.json (for editors) to a new or
// empty directory. Throws Error (usage) for a non-empty directory or a missing build, and OutputError.
void give_out(const Exercise& exercise, const std::filesystem::path& directory);

constexpr int kGradingSeconds = 30;  // limit of a learner's program; graders take less than 1 s

// Compiles the learner's file, links it into `directory`/build/tessera in place of the original and grades that program
// (takes seconds). Throws InputError for a missing file, Error (usage) without a build directory or compiler.
Verdict check(const Exercise& exercise, const std::filesystem::path& directory, int seconds = kGradingSeconds);

// Grades a program linked by check() in a sandboxed process (lab/learner.cpp); its output is written to `output`, at
// most 1 MiB. Throws Error if the process cannot be started or sandboxed.
Verdict grade_program(const Exercise& exercise, const std::filesystem::path& program,
                      const std::filesystem::path& output, int seconds = kGradingSeconds);
// The learner's side: answers requests until the channel is closed. Throws Error (usage) without a channel.
void answer(const Exercise& exercise);

// A submitted exercise or puzzle, found by its file name or task.txt in a learner's directory or its subdirectories.
struct Submission {
  const Exercise* exercise = nullptr;
  const Puzzle* puzzle = nullptr;
  std::filesystem::path directory;
};
// By learner (subdirectory of `directory`). Throws InputError if the directory does not exist.
std::map<std::string, std::vector<Submission>> handed_in(const std::filesystem::path& directory);

// Byte range [begin, end).
struct Part {
  size_t begin = 0, end = 0;
};

// The lines to blank between the braces of the definition. Throws Error (usage) unless there is exactly one.
Part blanked_part(std::string_view source, const Blank& blank);

// Source text without comments and whitespace (except in strings), for comparison.
std::string without_blanks(std::string_view text);

// Each blanked body is a comment and a call of not_yet().
std::string blanked_file(std::string_view source, const Exercise& exercise);

// The file with one new body per blank, in order.
std::string filled_file(std::string_view source, const Exercise& exercise, const std::vector<std::string>& bodies);

}  // namespace tessera::lab
