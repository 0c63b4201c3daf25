// Puzzles: files that a learner writes, graded at once by the product's own parts. Nothing of them is run but what they
// describe: a schedule on a simulated clock, placements on ranks that are threads, a plan by the planner's prediction.
//
// A puzzle is an entry with its targets, and a page, lab/pages/puzzles/NAME.md, which the program has in it. So puzzles
// need no checkout, no compiler and no C++. Their solutions are in the tests alone.
#pragma once
#include <filesystem>

#include "lab/exercise.h"

namespace tessera::lab {

struct Puzzle {
  std::string_view name, file;  // the file is what a learner writes
  // Lines that a right file was found to keep, and behind them its picture. Throws Wrong.
  std::function<Held(const std::string& text, const std::string& name)> grade;
  std::function<std::string(uint64_t seed)> runs = {};  // what is to be named, where that is the puzzle
  std::string_view page = {};
  int number = 0;  // its place in the list, from 1: p1

  std::string_view title() const { return title_of(page); }
};

const std::vector<Puzzle>& puzzles();
// By p1 or name; null where there is none.
const Puzzle* find_puzzle(std::string_view name);

// Writes README.md, the page, and the file to begin with, the last block of the page, into a new or empty folder; where
// there are runs, those of a fresh seed. Throws Error (usage) where the folder has something in it, OutputError.
void start(const Puzzle& puzzle, const std::filesystem::path& folder);
// The verdict on a file, or on that of a folder. Throws InputError where it cannot be read.
Verdict grade(const Puzzle& puzzle, const std::filesystem::path& file);
// A verdict for other programs: a line with an object.
std::string json(const Puzzle& puzzle, const Verdict& verdict);

const std::vector<File>& puzzles_files();  // their pages

}  // namespace tessera::lab
