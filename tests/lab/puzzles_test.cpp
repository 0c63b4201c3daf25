// Puzzles as a learner meets them: files that are given out, solutions that pass, and mistakes that are told apart.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "data/files.h"
#include "lab/placed_block.h"
#include "lab/puzzle.h"
#include "parallel/pipeline/schedules.h"
#include "parallel/pipeline/validate.h"
#include "settings/setting.h"
#include "tests/support/errors.h"

namespace tessera::lab {
namespace {

// The smallest bubbles that a search has found: 9.4% with 3 micro-batches in flight, 14.3% with 2.5.
constexpr const char* kThreeInFlight =
    "0F0 0F1 0F2 0F3 0F4 7F0 7I0 7W0 7F1 7I1 7W1 0I0 0F5 0W0 7F2 7I2 7W2 0I1 7F3 7I3 7W3 0F6 0W1 0I2 7F4 7I4 "
    "7W4 0I3 0F7 0W2 0W3 7F5 0I4 7I5 7W5 0W4 7F6 7I6 7F7 7I7 0I5 7W6 7W7 0W5 0I6 0W6 0I7 0W7\n"
    "1F0 1F1 1F2 1F3 1F4 6F0 6I0 6W0 6F1 1I0 6I1 6W1 6F2 1W0 6F3 1I1 6I2 6W2 1F5 6I3 6W3 1I2 6F4 1W1 1F6 1I3 "
    "6I4 6W4 1F7 1W2 6F5 1I4 1W3 1W4 6I5 6F6 6W5 6F7 6I6 1I5 6I7 6W6 6W7 1I6 1W5 1I7 1W6 1W7\n"
    "2F0 2F1 2F2 5F0 2F3 5F1 5I0 5W0 5F2 2I0 2W0 2F4 5I1 5W1 5F3 2I1 2W1 5I2 5F4 5W2 2I2 5I3 2F5 5W3 2I3 2F6 "
    "2W2 5I4 5F5 5W4 2I4 2F7 2W3 5F6 2W4 5I5 5F7 5W5 2I5 5I6 5W6 5I7 2I6 5W7 2I7 2W5 2W6 2W7\n"
    "3F0 4F0 3F1 4F1 3F2 4F2 4I0 3I0 4W0 3F3 3W0 4F3 4I1 3I1 4W1 3F4 3W1 4F4 4I2 3I2 4W2 3W2 4I3 3I3 3F5 4F5 "
    "4W3 3F6 4I4 3I4 4W4 4F6 3W3 3F7 3W4 4F7 4I5 3I5 4W5 3W5 4I6 3I6 4I7 3I7 4W6 4W7 3W6 3W7\n";
constexpr const char* kTwoAndAHalf =
    "0F0 0F1 0F2 0F3 7F0 7I0 7W0 7F1 7I1 7W1 0I0 0F4 0W0 7F2 7I2 7W2 0I1 0F5 0W1 7F3 7I3 0I2 7W3 0F6 0W2 7F4 "
    "7I4 0I3 7W4 0F7 0W3 7F5 7I5 0I4 7W5 0W4 7F6 7I6 7W6 7F7 7I7 0I5 7W7 0W5 0I6 0W6 0I7 0W7\n"
    "1F0 1F1 1F2 1F3 6F0 6I0 6W0 6F1 1I0 6I1 6W1 6F2 1W0 1F4 1I1 6I2 6W2 1W1 6F3 1F5 1I2 6I3 6W3 1W2 6F4 1F6 "
    "1I3 6I4 6W4 1W3 6F5 1F7 1I4 6I5 6W5 1W4 6F6 6F7 6I6 1I5 6I7 6W6 6W7 1I6 1W5 1I7 1W6 1W7\n"
    "2F0 2F1 2F2 5F0 5F1 5I0 5W0 2F3 2I0 2W0 5F2 5I1 5W1 2I1 2F4 2W1 5I2 5F3 5W2 2I2 2F5 2W2 5I3 5F4 5W3 2I3 "
    "2F6 2W3 5I4 5F5 5W4 2I4 2F7 2W4 5I5 5F6 5W5 5F7 2I5 2W5 5I6 5W6 5I7 2I6 5W7 2I7 2W6 2W7\n"
    "3F0 4F0 3F1 4F1 3F2 4I0 3I0 4W0 4F2 3W0 3F3 4I1 3I1 4W1 4F3 3W1 3F4 4I2 3I2 4W2 4F4 3W2 3F5 4I3 3I3 4W3 "
    "4F5 3W3 3F6 4I4 3I4 4W4 4F6 3W4 3F7 4I5 4W5 4F7 3I5 3W5 4I6 3I6 4I7 3I7 4W6 4W7 3W6 3W7\n";

constexpr const char* kMlp =
    "mlp tp=2\nx I->R\nup.weight S(0)\nup.bias S(0)\nh S(2)\ndown.weight S(1)\nz P->I\ndown.bias I\ny I\n";
constexpr const char* kAttention =
    "attention tp=4  # heads\nx I->R\nqkv.weight S(0)\nqkv.bias S(0)\nqkv S(2)\no S(2)\nproj.weight S(1)\na P->I\n"
    "proj.bias I\ny I\n";
constexpr const char* kTwoAxes =
    "mlp dp=2 tp=2\nx S(0) I->R\nup.weight I->R S(0)\nup.bias I->R S(0)\nh S(0) S(2)\ndown.weight I->R S(1)\n"
    "z S(0) P->I\ndown.bias I->R I\ny S(0) I\n";
constexpr const char* kBlock =
    "block tp=2\nx S(1)\nnorm1.weight I->R\nnorm1.bias I->R\nn1 S(1)->R\nqkv.weight S(0)\nqkv.bias S(0)\nqkv S(2)\n"
    "o S(2)\nproj.weight S(1)\na P->S(1)\nproj.bias I->R\nr S(1)\nnorm2.weight I->R\nnorm2.bias I->R\nn2 S(1)->R\n"
    "up.weight S(0)\nup.bias S(0)\nh S(2)\ndown.weight S(1)\nz P->S(1)\ndown.bias I->R\ny S(1)\n";

std::string changed(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

std::map<std::string, std::string> solutions() {
  return {{"fill", "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3\n"},
          {"memory", to_text(one_f_one_b(3, 6))},
          {"column-row", kMlp},
          {"heads", kAttention},
          {"data-and-tensor", kTwoAxes},
          {"traces", "seed 7\n1 gradients-divided-twice\n2 skipped-update\n3 gradients-summed-twice\n"},
          {"stages", to_text(interleaved(2, 4, 2))},
          {"two-halves", to_text(zb_h1(3, 5))},
          {"sequence", kBlock},
          {"card", "dp=8\nzero=3\nmicrobatches=2\nsequences=4\nrecompute='block'\n"},
          {"tight", to_text(v_half(4, 8))},
          {"crossing", "seed 7\n1 other-targets\n2 gpipe-for-1f1b\n3 missing-output-sum\n"},
          {"pipeline", "pp=8\nmicrobatches=64\nrecompute='activation'\nschedule='v-half'\n"},
          {"leaderboard", kTwoAndAHalf}};
}

struct Attempt {
  const char* puzzle;
  std::string text, says;
};

// Wrong files, and a part of what is said of each.
std::vector<Attempt> mistakes() {
  const auto twice = [](const char* puzzle, const std::string& name) {
    return Attempt{puzzle, "seed 7\n1 " + name + "\n2 " + name + "\n3 " + name + "\n", "The run would show"};
  };
  return {
      {"fill", "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3\n1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3\n", "goes backward too early"},
      {"fill", "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3\n1B0 1F0 1F1 1B1 1F2 1B2 1F3 1B3\n", "in the list of the same rank"},
      {"fill", "0F0 0F1 0B0 0F2 0B1 0F3 0B2\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3\n", "0B3 is missing"},
      {"memory", to_text(gpipe(3, 6)), "that is GPipe"},
      {"memory", to_text(naive(3, 6)), "one micro-batch at a time"},
      {"memory", to_text(zb_h1(3, 6)), "W's come late"},
      {"column-row", changed(kMlp, "x I->R", "x I"), "x on tp is I in linear"},
      {"column-row", changed(kMlp, "z P->I", "z I"), "is a partial sum on each rank"},
      {"column-row", "mlp tp=2\nx I\nup.weight S(0)->I\nup.bias I\nh I\ndown.weight I\nz I\ndown.bias I\ny I\n",
       "broke  parameters"},
      {"heads", changed(kAttention, "proj.weight S(1)", "proj.weight S(0)"), "broke  table"},
      {"heads", changed(changed(kAttention, "qkv S(2)", "qkv S(2)->S(1)"), "o S(2)", "o S(1)->S(2)"),
       "qkv on tp is S(1)"},
      {"heads", changed(changed(kAttention, "qkv S(2)", "qkv S(2)->S(0)"), "o S(2)", "o S(0)->S(2)"), "broke  bytes"},
      {"data-and-tensor", changed(kTwoAxes, "up.weight I->R", "up.weight I"), "nobody sums the parts"},
      {"data-and-tensor", changed(kTwoAxes, "up.weight I->R", "up.weight R"), "up.weight on dp begins as R"},
      {"data-and-tensor", changed(kTwoAxes, "h S(0) S(2)", "h S(0) P"), "h on tp is P"},
      twice("traces", "gradients-summed-twice"),
      twice("traces", "skipped-update"),
      twice("traces", "gradients-divided-twice"),
      {"stages", to_text(one_f_one_b(2, 4)), "one long stage"},
      {"stages",
       "0F0 1F0 0F1 1F1 0F2 1F2 0F3 1F3 1B0 0B0 1B1 0B1 1B2 0B2 1B3 0B3\n"
       "2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1 2F2 3F2 3B2 2B2 2F3 3F3 3B3 2B3\n",
       "neighbouring stages"},
      {"stages", changed(to_text(interleaved(2, 4, 2)), "0F0", "0G0"), "word 1: '0G0' is no action"},
      {"two-halves", to_text(one_f_one_b(3, 5)), "B is whole"},
      {"two-halves", to_text(split_backward(one_f_one_b(3, 5))), "every W follows its I at once"},
      {"two-halves", to_text(zb_h2(3, 5)), "broke  in flight"},
      {"sequence", changed(kBlock, "norm1.weight I->R", "norm1.weight I"), "norm1.weight on tp is I in normed"},
      {"sequence", changed(kBlock, "a P->S(1)", "a P->I"), "a on tp is I in sum"},
      {"sequence", changed(changed(kBlock, "x S(1)", "x I"), "y S(1)", "y I"), "broke  size"},
      {"card", "dp=8\nmicrobatches=8\n", "most of it optimizer"},
      {"card", "dp=8\nzero=3\nsequences=8\n", "most of it activations"},
      {"card", "tp=8\nmicrobatches=32\nsequences=2\n", "fewer ranks of tp"},
      {"tight", to_text(one_f_one_b(4, 8)), "broke  in flight"},
      {"tight", to_text(v_min(4, 8)), "broke  bubble"},
      {"tight", to_text(interleaved(4, 8, 2)), "rank 0 keeps"},
      twice("crossing", "missing-output-sum"),
      twice("crossing", "early-receive"),
      twice("crossing", "gpipe-for-1f1b"),
      {"pipeline", "dp=8\nzero=3\nmicrobatches=2\nsequences=4\nrecompute='block'\n", "broke  zero"},
      {"pipeline", "pp=8\nmicrobatches=8\nsequences=8\nrecompute='block'\nschedule='1f1b'\n",
       "ranks wait in the pipeline"},
      {"pipeline", "pp=8\nmicrobatches=64\nschedule='gpipe'\n", "most of it activations"},
      {"leaderboard", to_text(v_half(4, 8)), "broke  in flight"},
      {"leaderboard", to_text(v_min(4, 8)), "expected at most 18.0%"},
      {"leaderboard", to_text(zb_h1(4, 8)), "broke  in flight"},
  };
}

std::string verdict_on(const char* puzzle, const std::string& text) {
  const TemporaryDirectory place(temporary_folder() / "tessera-puzzle");
  write_file(place.path() / "mine", text);
  return grade(*find_puzzle(puzzle), place.path() / "mine").text;
}

TEST(Puzzles, EverySolutionPassesAndHasAPicture) {
  const auto all = solutions();
  EXPECT_EQ(all.size(), puzzles().size());
  for (const Puzzle& p : puzzles()) {
    const std::string text = verdict_on(p.name.data(), all.at(std::string(p.name)));
    EXPECT_TRUE(has(text, ": solved\n  held ")) << text;
    EXPECT_TRUE(has(text, "\n\n  ")) << text;
  }
}

TEST(Puzzles, MistakesAreToldApart) {
  std::map<std::string, std::set<std::string>> told;
  for (const Attempt& a : mistakes()) {
    const std::string text = verdict_on(a.puzzle, a.text);
    EXPECT_TRUE(has(text, ": not yet\n  broke ") && has(text, a.says)) << a.says << " of\n" << a.text << "\n" << text;
    told[a.puzzle].insert(text.substr(0, text.find("\n\n")));
  }
  for (const Puzzle& p : puzzles()) EXPECT_GE(told[std::string(p.name)].size(), 3U) << p.name;
}

TEST(Puzzles, TheBestKnownIsKnown) {
  EXPECT_TRUE(has(verdict_on("tight", kThreeInFlight), "your bubble 9.4%, best known 9.4%"));
  EXPECT_TRUE(has(verdict_on("leaderboard", kTwoAndAHalf), "your bubble 14.3%, best known 14.3%"));
}

TEST(Puzzles, FilesThatAreNoneAreRefusedInOneLine) {
  for (const Puzzle& p : puzzles()) {
    for (const std::string& text : {std::string(),
                                    std::string("\x7f"
                                                "ELF\0\xff\xfe\n\x01",
                                                9),
                                    std::string("x\n")}) {
      const std::string verdict = verdict_on(p.name.data(), text);
      EXPECT_TRUE(has(verdict, "not yet\n  broke ")) << p.name << verdict;
      EXPECT_EQ(verdict.find('\x7f'), std::string::npos) << verdict;
    }
    EXPECT_THROW(grade(p, "/no/such/file"), InputError);
  }
}

TEST(Puzzles, EachIsGivenOutWithAPageOfOneScreen) {
  const TemporaryDirectory place(temporary_folder() / "tessera-puzzle");
  for (const Puzzle& p : puzzles()) {
    EXPECT_TRUE(p.page.starts_with("# p" + std::to_string(p.number) + ". ")) << p.name;
    EXPECT_LE(std::ranges::count(p.page, '\n'), 40) << p.name;
    const auto folder = place.path() / p.name;
    start(p, folder);
    EXPECT_THROW(start(p, folder), Error);
    EXPECT_EQ(read_file(folder / "README.md"), p.page);
    EXPECT_FALSE(grade(p, folder).solved) << p.name;
    EXPECT_EQ(std::filesystem::exists(folder / "runs.txt"), p.file == "answers.txt");
  }
  EXPECT_GE(puzzles().size(), 12U);
}

// The table accepts no file that a run shows to be wrong, whichever placement is another.
TEST(Placements, TheTableAcceptsNothingThatARunRefuses) {
  std::vector<std::string> words{"R", "I", "P", "S(0)", "S(1)", "S(2)"};
  for (size_t from = 0; from < 6; ++from)
    for (size_t to = 0; to < 6; ++to)
      if (from != to) words.push_back(words[from] + "->" + words[to]);
  int refused = 0;
  for (const std::string& line : split(kMlp, '\n'))
    for (const std::string& word : words) {
      if (line.empty() || line.starts_with("mlp")) continue;
      const std::string other = line.substr(0, line.find(' ') + 1) + word;
      const PlacementVerdict v = check_placements(changed(kMlp, line + "\n", other + "\n"), "a file");
      EXPECT_TRUE(!v.found.empty() || v.good() || v.run.starts_with("[shape]")) << other << ": " << v.run;
      refused += !v.found.empty() && !v.alike;
    }
  EXPECT_GE(refused, 200);
}

}  // namespace
}  // namespace tessera::lab
