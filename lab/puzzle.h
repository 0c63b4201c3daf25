// Puzzles: files that a learner writes, graded at once by the product's own parts. Nothing of them is run but what they
// describe: a schedule on a simulated clock, placements on ranks that are threads, a plan by the planner's prediction.
//
// A puzzle is an entry with its targets, and a page, lab/pages/puzzles/NAME.md, which the program has in it. So puzzles
// need no checkout, no compiler and no C++. A learner's seed decides its numbers,
// so that files of two learners are not interchangeable, and no command prints a solution.
#pragma once
#include <filesystem>

#include "lab/exercise.h"

namespace tessera::lab {

// A right file: lines that it was found to keep, its picture, and numbers by which learners may be compared.
struct Right {
  PassedChecks held;
  std::string picture;
  Scores score;
};

// A learner's own: what a seed asks for.
struct Task {
  std::string numbers;                     // lines of a page
  std::string begun = {};                  // what the file begins with
  std::string solution = {};               // a file that solves it, where a search has found one: for tests
  std::function<std::string()> runs = {};  // to be named, of a puzzle that has them
  // Throws Wrong.
  std::function<Right(const std::string& text, const std::string& name)> grade = {};
};

struct Puzzle {
  std::string_view name, file;  // the file is what a learner writes
  std::vector<Bound> bounds;
  std::function<Task(uint64_t seed)> task;
  std::string_view page = {};
  int number = 0;  // its place in the list, from 1: p1

  std::string_view title() const { return page_title(page); }
};

const std::vector<Puzzle>& puzzles();
// By p1 or name; null where there is none.
const Puzzle* find_puzzle(std::string_view name);

// The file in which `start` notes which puzzle a directory has, and its seed: "p2 seed 123456".
inline constexpr std::string_view kTaskFile = "task.txt";
// The puzzle of a directory that was given out; null where there is none.
const Puzzle* puzzle_in(const std::filesystem::path& folder);

// Writes task.txt, README.md, which is the page with the numbers of the seed, and the file to begin with, the last
// block of the page, into a new or empty folder; where there are runs, those of the seed. Throws Error (usage) where
// the folder has something in it, OutputError.
void start(const Puzzle& puzzle, const std::filesystem::path& folder);
void start(const Puzzle& puzzle, const std::filesystem::path& folder, uint64_t seed);
// The verdict on a file, or on that of a folder. The seed is that of the folder's task.txt; of a file without one that
// of its first line, "# p2 seed 123456", or 0. Throws InputError where a file cannot be read, or the folder is of
// another puzzle.
Verdict grade(const Puzzle& puzzle, const std::filesystem::path& file);
// A verdict for other programs: a line with an object, whose it is in it if that is said.
std::string json(const Puzzle& puzzle, const Verdict& verdict, const std::string& learner = "");

const std::vector<File>& puzzles_files();  // their pages

}  // namespace tessera::lab
