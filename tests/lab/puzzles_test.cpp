// Puzzles as a learner meets them: files that are given out, solutions that pass, and mistakes that are told apart.
#include <algorithm>
#include <map>

#include "lab/placed_block.h"
#include "lab/puzzle.h"
#include "parallel/pipeline/schedules.h"
#include "parallel/pipeline/validate.h"
#include "settings/setting.h"
#include "tests/lab/sections.h"
#include "tests/support/errors.h"

namespace tessera::lab {
namespace {

std::string changed(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

// They stand in tests/lab/solutions.txt, or are schedules that the product has.
std::map<std::string, std::string> solutions() {
  std::map<std::string, std::string> out{{"memory", to_text(one_f_one_b(3, 6))},
                                         {"stages", to_text(interleaved(2, 4, 2))},
                                         {"two-halves", to_text(zb_h1(3, 5))},
                                         {"tight", to_text(v_half(4, 8))}};
  for (const Section& s : sections_of("solutions.txt")) out[s.words[0]] = s.texts[0].second;
  return out;
}

struct Attempt {
  const char* puzzle;
  std::string text, says;
};

// Wrong files, and a part of what is said of each.
std::vector<Attempt> mistakes() {
  const auto all = solutions();
  const std::string &mlp = all.at("column-row"), &heads = all.at("heads"), &axes = all.at("data-and-tensor"),
                    &block = all.at("sequence");
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
      {"column-row", changed(mlp, "x I->R", "x I"), "x on tp is I in linear"},
      {"column-row", changed(mlp, "z P->I", "z I"), "is a partial sum on each rank"},
      {"column-row", "mlp tp=2\nx I\nup.weight S(0)->I\nup.bias I\nh I\ndown.weight I\nz I\ndown.bias I\ny I\n",
       "broke  parameters"},
      {"heads", changed(heads, "proj.weight S(1)", "proj.weight S(0)"), "broke  table"},
      {"heads", changed(changed(heads, "qkv S(2)", "qkv S(2)->S(1)"), "o S(2)", "o S(1)->S(2)"), "qkv on tp is S(1)"},
      {"heads", changed(changed(heads, "qkv S(2)", "qkv S(2)->S(0)"), "o S(2)", "o S(0)->S(2)"), "broke  bytes"},
      {"data-and-tensor", changed(axes, "up.weight I->R", "up.weight I"), "nobody sums the parts"},
      {"data-and-tensor", changed(axes, "up.weight I->R", "up.weight R"), "up.weight on dp begins as R"},
      {"data-and-tensor", changed(axes, "h S(0) S(2)", "h S(0) P"), "h on tp is P"},
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
      {"sequence", changed(block, "norm1.weight I->R", "norm1.weight I"), "norm1.weight on tp is I in normed"},
      {"sequence", changed(block, "a P->S(1)", "a P->I"), "a on tp is I in sum"},
      {"sequence", changed(changed(block, "x S(1)", "x I"), "y S(1)", "y I"), "broke  size"},
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
  EXPECT_EQ(all.size(), puzzles().size() + 1);
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
  EXPECT_TRUE(has(verdict_on("tight", solutions().at("three in flight")), "your bubble 9.4%, best known 9.4%"));
  EXPECT_TRUE(has(verdict_on("leaderboard", solutions().at("leaderboard")), "your bubble 14.3%, best known 14.3%"));
}

TEST(Puzzles, FilesThatAreNoneAreRefusedInOneLine) {
  for (const Puzzle& p : puzzles()) {
    for (const std::string& text : {std::string(), std::string("\177ELF\0\xff\xfe\n\1", 9), std::string("x\n")}) {
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
  const std::string mlp = solutions().at("column-row");
  int refused = 0;
  for (const std::string& line : split(mlp, '\n'))
    for (const std::string& word : words) {
      if (line.empty() || line.starts_with("mlp")) continue;
      const std::string other = line.substr(0, line.find(' ') + 1) + word;
      const PlacementVerdict v = check_placements(changed(mlp, line + "\n", other + "\n"), "a file");
      EXPECT_TRUE(!v.found.empty() || v.good() || v.run.starts_with("[shape]")) << other << ": " << v.run;
      refused += !v.found.empty() && !v.alike;
    }
  EXPECT_GE(refused, 200);
}

}  // namespace
}  // namespace tessera::lab
