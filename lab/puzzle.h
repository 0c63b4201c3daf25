// Puzzles: a learner's files, graded immediately by Tessera itself: schedules by simulation, placements on thread
// ranks, plans by prediction. No learner code is run.
//
// A puzzle has targets and an embedded page, lab/pages/puzzles/NAME.md, and requires no checkout, compiler or C++. A
// learner's seed determines the problem instance, so learners cannot exchange solutions, and no command prints one.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lab/exercise.h"

namespace tessera::lab {

// Result of a correct file.
struct Right {
  PassedChecks held;
  std::string picture;
  Scores score;
};

struct Task {
  std::string instance;                    // lines of the page
  std::string begun = {};                  // initial content of the file
  std::string solution = {};               // found by a search; for tests
  std::function<std::string()> runs = {};  // text of runs.txt, for puzzles with runs to diagnose
  // Throws Failure.
  std::function<Right(const std::string& text, const std::string& name)> grade = {};
};

struct Puzzle : Assignment {
  std::function<Task(uint64_t seed)> task;
};

const std::vector<Puzzle>& puzzles();
// By number (p1) or name; null if there is none.
const Puzzle* find_puzzle(std::string_view name);

// Written by `start`: "p2 seed 123456".
inline constexpr std::string_view kTaskFile = "task.txt";
// Null if the directory was not created by start().
const Puzzle* puzzle_in(const std::filesystem::path& directory);

// Writes task.txt, README.md (the page with the seed's numbers), the initial file (the last block of the page) and
// runs.txt (if any) to a new or empty directory. Throws Error (usage) if it is not empty, and OutputError.
void start(const Puzzle& puzzle, const std::filesystem::path& directory);
void start(const Puzzle& puzzle, const std::filesystem::path& directory, uint64_t seed);
// Grades a file or the file in a directory. The seed is taken from task.txt of the directory, otherwise from the file's
// first line, "# p2 seed 123456", or 0. Throws InputError for an unreadable file or the directory of another puzzle.
Verdict grade(const Puzzle& puzzle, const std::filesystem::path& file);
const std::vector<EmbeddedFile>& puzzles_files();  // embedded pages

}  // namespace tessera::lab
