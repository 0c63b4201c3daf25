// Puzzles as a learner meets them: files that are given out, solutions that pass, and mistakes that are told apart.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

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
  std::string puzzle, bound, text, says = "";
};

// Wrong files, the bound that refuses each, and a part of what is said of it: those of tests/lab/puzzle_mistakes.txt,
// and schedules that the product has.
std::vector<Attempt> mistakes() {
  const auto all = solutions();
  const auto twice = [](const char* puzzle, const std::string& name) {
    return Attempt{puzzle, "name", "seed 7\n1 " + name + "\n2 " + name + "\n3 " + name + "\n", "The run would show"};
  };
  std::vector<Attempt> out{
      {"fill", "size", to_text(gpipe(3, 4)), "expected 2, 4 and at most 1"},
      {"fill", "size", to_text(gpipe(2, 5))},
      {"fill", "size", to_text(interleaved(2, 4, 2))},
      {"memory", "in flight", to_text(gpipe(3, 6)), "that is GPipe"},
      {"memory", "bubble", to_text(naive(3, 6)), "expected at most 25.0%\n  cause  one micro-batch at a time"},
      {"memory", "in flight", to_text(zb_h1(3, 6)), "W's come late"},
      {"memory", "size", to_text(interleaved(3, 6, 2)), "expected 3, 6 and at most 1"},
      twice("traces", "gradients-summed-twice"),
      twice("traces", "skipped-update"),
      twice("traces", "gradients-divided-twice"),
      {"stages", "bubble", to_text(one_f_one_b(2, 4)), "one long stage"},
      {"stages", "bubble", to_text(gpipe(2, 4)), "20.0% of the time; expected at most 11.1%"},
      {"stages", "size", to_text(interleaved(2, 4, 3)), "expected 2, 4 and at most 2"},
      {"two-halves", "bubble", to_text(one_f_one_b(3, 5)), "B is whole"},
      {"two-halves", "bubble", to_text(split_backward(one_f_one_b(3, 5))), "every W follows its I at once"},
      {"two-halves", "in flight", to_text(zb_h2(3, 5))},
      {"two-halves", "size", to_text(zb_v(3, 5)), "expected 3, 5 and at most 1"},
      {"card", "speed", "tp=8\nmicrobatches=32\nsequences=2\n",
       "at least 15000\n  cause  activations of every layer go over PCI Express: fewer"},
      {"tight", "in flight", to_text(one_f_one_b(4, 8)), "rank 0 keeps 4 F at once"},
      {"tight", "in flight", to_text(interleaved(4, 8, 2)), "rank 0 keeps"},
      {"tight", "bubble", to_text(v_min(4, 8)), "expected at most 16.0%"},
      {"tight", "size", to_text(interleaved(4, 8, 3)), "expected 4, 8 and at most 2"},
      twice("crossing", "missing-output-sum"),
      twice("crossing", "early-receive"),
      twice("crossing", "gpipe-for-1f1b"),
      {"pipeline", "speed", "pp=8\nmicrobatches=8\nsequences=8\nrecompute='block'\nschedule='1f1b'\n",
       "at least 16000\n  cause  ranks wait in the pipeline"},
      {"leaderboard", "in flight", to_text(v_half(4, 8)), "rank 0 keeps 6 F at once"},
      {"leaderboard", "in flight", to_text(zb_h1(4, 8))},
      {"leaderboard", "bubble", to_text(v_min(4, 8)), "expected at most 18.0%"},
      {"leaderboard", "size", to_text(interleaved(4, 8, 3)), "expected 4, 8 and at most 2"},
  };
  for (const Section& x : sections_of("puzzle_mistakes.txt")) {
    const Texts changes = changes_of(x);
    std::string text = changes.empty() ? x.texts[0].second : all.at(x.words[0]);
    for (const auto& [from, to] : changes) text = changed(text, from, to);
    out.push_back({x.words[0], x.words[1], text, x.words.size() > 2 ? x.words[2] : ""});
  }
  return out;
}

// The bounds of a puzzle that a file can violate. The limits of fill and stages allow all micro-batches in flight, and
// that of card every stage of ZeRO.
std::set<std::string> bounds(const Puzzle& p) {
  if (p.name == "fill") return {"schedule", "size"};
  if (p.name == "stages") return {"schedule", "size", "bubble"};
  if (p.file == "schedule.txt") return {"schedule", "size", "in flight", "bubble"};
  if (p.file == "placements.txt") return {"size", "table", "values", "parameters", "bytes"};
  if (p.name == "card") return {"size", "memory", "speed"};
  if (p.name == "pipeline") return {"size", "zero", "memory", "speed"};
  return {"name"};
}

std::string verdict_on(std::string_view puzzle, const std::string& text) {
  const TemporaryDirectory place(temporary_folder() / "tessera-puzzle");
  write_file(place.path() / "mine", text);
  return grade(*find_puzzle(puzzle), place.path() / "mine").text;
}

// Most of them are as large as the limit allows, which is accepted.
TEST(Puzzles, EverySolutionPassesAndHasAPicture) {
  const std::map<std::string_view, const char*> held{
      {"fill", "your bubble 20.0%, best known 7.7%"},
      {"memory", "in flight by rank: 3 2 1\n  held   your bubble 25.0%, best known 18.2%"},
      {"column-row", "16384 bytes sent, 8576 bytes of parameters"},
      {"heads", "49152 bytes sent, 2272 bytes of parameters"},
      {"data-and-tensor", "50688 bytes sent, 8576 bytes of parameters"},
      {"sequence", "34304 bytes sent, 13504 bytes of parameters"},
      {"stages", "your bubble 11.1%, best known 4.0%"},
      {"two-halves", "in flight by rank: 3 3 3\n  held   your bubble 11.8%, best known 11.8%"},
      {"tight", "in flight by rank: 6 6 6 6\n  held   your bubble 15.8%, best known 9.4%"},
      {"leaderboard", "in flight by rank: 5 5 5 5\n  held   your bubble 14.3%, best known 14.3%"}};
  const auto all = solutions();
  EXPECT_EQ(all.size(), puzzles().size() + 1);
  for (const Puzzle& p : puzzles()) {
    const std::string text = verdict_on(p.name, all.at(std::string(p.name)));
    EXPECT_TRUE(has(text, ": solved\n  held ")) << text;
    EXPECT_TRUE(has(text, "\n\n  ")) << text;
    if (held.contains(p.name)) {
      EXPECT_TRUE(has(text, held.at(p.name))) << text;
    }
  }
}

TEST(Puzzles, EachBoundRefusesMistakesAndIsNamed) {
  std::map<std::string, std::set<std::string>> told, refused;
  for (const Attempt& a : mistakes()) {
    const std::string text = verdict_on(a.puzzle, a.text);
    EXPECT_TRUE(has(text, fmt::format(": not yet\n  broke  {}\n", a.bound)) && has(text, a.says))
        << a.bound << ": " << a.says << " of\n"
        << a.text << "\n"
        << text;
    told[a.puzzle].insert(text.substr(0, text.find("\n\n")));
    refused[a.puzzle].insert(a.bound);
  }
  for (const Puzzle& p : puzzles()) {
    EXPECT_GE(told[std::string(p.name)].size(), 3U) << p.name;
    EXPECT_EQ(refused[std::string(p.name)], bounds(p)) << p.name;
  }
}

TEST(Puzzles, TheBestKnownIsKnown) {
  EXPECT_TRUE(has(verdict_on("tight", solutions().at("three in flight")), "your bubble 9.4%, best known 9.4%"));
}

// A seed decides which fault each run has. The parts are of what each fault shows, in the order of the runs.
TEST(Puzzles, RunsAndAnswersFollowTheSeed) {
  const Puzzle& p = *find_puzzle("traces");
  const char *none = " 0 bytes sent", *half = "all 0.5 times", *same = "as before the step",
             *twice = "231424 bytes sent";
  using Names = std::vector<const char*>;
  for (const auto& [seed, names, parts] :
       {std::tuple(0, Names{"missing-gradient-sum", "gradients-divided-twice", "skipped-update"},
                   Names{none, half, same}),
        {7, {"gradients-divided-twice", "skipped-update", "gradients-summed-twice"}, {half, same, twice}}}) {
    const std::string answers = fmt::format("seed {}\n1 {}\n2 {}\n3 {}\n", seed, names[0], names[1], names[2]);
    EXPECT_TRUE(has(verdict_on("traces", answers), "held   score 3 of 3")) << answers;
    const std::string wrong = changed(answers, names[1], names[0]);
    EXPECT_TRUE(has(verdict_on("traces", wrong), fmt::format("run 2 is not {}; score 2 of 3", names[0]))) << wrong;
    const std::string runs = p.runs(static_cast<uint64_t>(seed));
    for (size_t i = 0; i < 3; ++i) {
      const size_t begin = runs.find(fmt::format("run {}\n", i + 1)), end = runs.find(fmt::format("run {}\n", i + 2));
      for (const char* part : {none, half, same, twice})
        EXPECT_EQ(has(runs.substr(begin, end - begin), part), part == parts[i]) << part << " in run " << i << runs;
    }
  }
  const std::string file = "\n1 skipped-update\n2 skipped-update\n3 skipped-update\n";
  EXPECT_TRUE(has(verdict_on("traces", "seed 1000000000" + file), "broke  name"));
  EXPECT_TRUE(has(verdict_on("traces", "seed 1000000001" + file), "broke  file"));
}

TEST(Puzzles, FilesThatAreNoneAreRefusedInOneLine) {
  for (const Puzzle& p : puzzles()) {
    for (const std::string& text : {std::string(), std::string("\177ELF\0\xff\xfe\n\1", 9), std::string("x\n")}) {
      const std::string verdict = verdict_on(p.name, text);
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
    if (p.name == "traces") {
      const uint64_t seed = std::stoull(read_file(folder / p.file).substr(5));
      EXPECT_EQ(read_file(folder / "runs.txt"), p.runs(seed)) << seed;
    }
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
