// Puzzles end to end: created files, passing solutions, diagnosed mistakes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/setting.h"
#include "examples/eager_1f1b.h"
#include "lab/placed_block.h"
#include "lab/puzzle.h"
#include "lab/schedule_task.h"
#include "parallel/pipeline/schedules.h"
#include "parallel/pipeline/validate.h"
#include "planner/search.h"
#include "tests/lab/sections.h"
#include "tests/support/errors.h"

namespace tessera::lab {
namespace {

std::string changed(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

constexpr uint64_t kSeeds = 50;

std::string verdict_on(const Puzzle& p, uint64_t seed, const std::string& text) {
  const TemporaryDirectory place(temporary_directory() / "tessera-puzzle");
  write_file(place.path() / "mine", fmt::format("# p{} seed {}\n", p.number, seed) + text);
  return grade(p, place.path() / "mine").text;
}

// Solutions: those of schedules and plans are found by search, all others are in tests/lab/solutions.txt.
std::string solution(const Puzzle& p, const Task& task) {
  if (!task.solution.empty()) return task.solution;
  for (const Section& section : read_sections("solutions.txt")) {
    if (section.fields[0] != p.name) continue;
    std::string text = section.texts[0].second;
    if (task.begun.empty()) return text;
    const std::vector<std::string> given = split(task.begun, '\n');  // ranks, x, y, and vectors sharded between steps
    const auto last_word = [&](size_t line) { return given[line].substr(given[line].rfind(' ') + 1); };
    const std::string x = last_word(1), y = last_word(2), bias = y == "I" ? "I" : y == "S(2)" ? "S(0)" : "I->R";
    for (const auto& [name, value] : {std::pair{"{x}", x}, {"{y}", y}, {"{b}", bias}})
      for (size_t at = 0; (at = text.find(name, at)) != std::string::npos;) text.replace(at, 3, value);
    for (size_t line = 3; line + 1 < given.size(); ++line) {
      const std::string name = given[line].substr(0, given[line].find(' '));
      text = changed(text, name + " I->R", name + " S(0)->R");
    }
    return given[0] + "\n" + text;
  }
  return "";
}

// The first seed whose task has these ranks.
uint64_t seed_with(const Puzzle& p, const std::string& first) {
  uint64_t seed = 0;
  while (!p.task(seed).begun.starts_with(first)) ++seed;
  return seed;
}

const Puzzle& puzzle(const std::string& name) { return *find_puzzle(name); }

// The first seed with the default assignment of stages to ranks.
uint64_t seed_in_order(const Puzzle& p) {
  for (uint64_t seed = 0;; ++seed) {
    const Schedule s = parse_schedule(p.task(seed).solution, "");
    const bool is_v = s.chunks() > 1 && s.ranks > 2;
    const Schedule plain = is_v ? empty_v("", s.ranks, 1) : empty_schedule("", s.ranks, s.chunks(), 1);
    if (s.rank_of_stage == plain.rank_of_stage) return seed;
  }
}

// Reorders the lines of a schedule to match the ranks of the stages in `known`, if possible.
Schedule on_job_ranks(const Schedule& known, const Schedule& s) {
  Schedule out = s;
  if (known.stages != s.stages || known.ranks != s.ranks) return out;
  for (size_t stage = 0; stage < s.rank_of_stage.size(); ++stage)
    out.actions[static_cast<size_t>(known.rank_of_stage[stage])] =
        s.actions[static_cast<size_t>(s.rank_of_stage[stage])];
  return out;
}

// The failed check of a file, or empty.
std::string broken_bound(const Task& task, const std::string& text) {
  try {
    task.grade(text, "a file");
    return "";
  } catch (const Failure& wrong) {
    return wrong.bound;
  }
}

TEST(Puzzles, EverySeedHasASolution) {
  for (const Puzzle& p : puzzles()) {
    if (p.file == "answers.txt") {
      EXPECT_TRUE(has(verdict_on(p, 7, solution(p, p.task(7))), ": solved\n  passed score 3 of 3\n\n  run 1 [#]"))
          << p.name;
      continue;
    }
    std::set<std::string> tasks;
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      const Task task = p.task(seed);
      if (!tasks.insert(task.instance + task.begun).second) continue;
      EXPECT_EQ(broken_bound(task, solution(p, task)), "") << p.name << ", seed " << seed << "\n" << task.instance;
    }
    EXPECT_GE(tasks.size(), 20U) << p.name;
  }
}

// Files of other learners are rejected even without the first line that names the seed.
TEST(Puzzles, FilesOfTwoLearnersAreNotInterchangeable) {
  for (const Puzzle& p : puzzles()) {
    const size_t learners = p.file == "answers.txt" ? 3 : 16, neighbours = 4;  // grading answers runs the faults
    std::vector<Task> tasks;
    for (size_t i = 0; i < learners + neighbours; ++i) tasks.push_back(p.task(7 + i));
    size_t taken = 0;
    for (size_t i = 0; i < (p.file == "answers.txt" ? 1 : learners); ++i)
      for (size_t other = 1; other <= neighbours; ++other)
        taken += broken_bound(tasks[i + other], solution(p, tasks[i])).empty();
    EXPECT_LE(taken, learners * neighbours / 10) << p.name;
  }
}

// Output of Tessera solves no puzzle: built-in schedules of these sizes and plans for the task.
TEST(Puzzles, BuiltInOutputSolvesNoInstance) {
  std::map<std::pair<int64_t, int64_t>, std::vector<std::string>> plans;  // by sequences and context
  for (const Puzzle& p : puzzles()) {
    std::set<std::string> tasks;
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      if (p.file == "plan.toml" && seed >= 16) continue;  // each requires a search
      const Task task = p.task(seed);
      std::vector<std::string> printed;
      int ranks = 0, microbatches = 0, context = 0;
      if (std::sscanf(task.instance.c_str(), "- %d ranks, %d", &ranks, &microbatches) == 2) {
        std::vector<Schedule> made = builtin_schedules(ranks, microbatches);
        made.push_back(eager_1f1b(ranks, microbatches));
        const Schedule known = parse_schedule(task.solution, "");
        for (const Schedule& s : made)
          for (const Schedule& other : {s, split_backward(s)})
            for (const Schedule& moved : {other, on_job_ranks(known, other)})
              if (!s.has(PassKind::W) || other == s) printed.push_back(to_text(moved));
      } else if (std::sscanf(task.instance.c_str(), "- %d sequences of %d", &ranks, &context) == 2) {
        if (!tasks.insert(task.instance).second) continue;
        std::vector<std::string>& of = plans[{ranks, context}];
        if (of.empty()) {
          planner::SearchRequest q{planner::ModelShape(*preset("llama2-7b")), planner::hardware_named("rtx4090"),
                                   planner::software_named("tessera"), 8, ranks};
          q.model.context = context;
          for (planner::Candidate& c : planner::search(q).best) {
            of.emplace_back();
            for (const Setting& s : field_descriptors(c.layout))
              of.back() += fmt::format("{} = {}\n", s.name, s.written());
          }
        }
        for (const std::string& plan : of)
          for (const int layers : {0, 4, 28, 32})
            printed.push_back(plan + fmt::format("recompute_layers = {}\n", layers));
      }
      for (const std::string& text : printed)
        EXPECT_NE(broken_bound(task, text), "") << p.name << ", seed " << seed << "\n" << text;
      EXPECT_EQ(printed.empty(), p.file == "answers.txt" || p.file == "placements.txt");
    }
  }
}

struct Attempt {
  std::string puzzle, bound, text, says = "";
  uint64_t seed = 0;
};

// Wrong files with the failed check and a substring of the verdict: tests/lab/puzzle_mistakes.txt, built-in schedules,
// and truncated solutions.
std::vector<Attempt> mistakes() {
  std::vector<Attempt> out;
  for (const Puzzle& p : puzzles()) {
    const std::string name(p.name);
    if (p.file == "answers.txt")
      for (const char* fault : {"skipped-update", "gradients-summed-twice", "gradients-divided-twice", "early-receive",
                                "missing-output-sum", "gpipe-for-1f1b"})
        if (has(p.page, fault))
          out.push_back(
              {name, "name", fmt::format("1 {0}\n2 {0}\n3 {0}\n", fault), "With this fault the run would report", 7});
    if (p.file == "plan.toml") {
      const int batch = std::stoi(p.task(0).instance.substr(2));
      const auto plan = [&](const char* bound, const char* rest, int sequences, int dp, const char* says = "") {
        out.push_back({name, bound,
                       fmt::format("dp = {}\nsequences = {}\nmicrobatches = {}\nrecompute_layers = 28\n{}\n", dp,
                                   sequences, batch / dp / sequences, rest),
                       says});
      };
      plan("size", "tp = 2", 1, 2, "expected 8 and");
      out.push_back({name, "size", fmt::format("dp = 8\nmicrobatches = {}\nrecompute_layers = 32\n", batch / 8),
                     "recompute_layers = 32; expected 4 to 28"});
      if (p.name == "pipeline") {
        plan("zero", "zero = 3", 1, 8, "zero = 3; expected at most 1");
        plan("memory", "pp = 8\nschedule = 'gpipe'", 1, 1, "mostly activations");
        plan("activations", "pp = 8\nschedule = 'v-half'\nrecompute = 'activation'", 1, 1, "of fewer sequences");
      } else {
        plan("memory", "", 1, 8, "mostly optimizer");
        plan("activations", "zero = 3\nrecompute = 'block'", 5, 8, "of fewer sequences");
      }
      plan("speed", "tp = 8\nrecompute = 'block'\nsp = true", 1, 1, "fewer tp ranks");
    }
    if (p.file != "schedule.txt") continue;
    const size_t begin = out.size();
    const uint64_t seed = seed_in_order(p);
    const std::string right = p.task(seed).solution;
    const Schedule s = parse_schedule(right, name);
    const int r = s.ranks, m = s.microbatches;
    out.push_back({name, "schedule", right.substr(0, right.find_last_of(' ')) + "\n", "is missing"});
    out.push_back({name, "schedule", "0G0\n", "word 1: '0G0' is not an action"});
    out.push_back({name, "size", to_text(gpipe(r, m + 1)), fmt::format("expected {}, {} and {}", r, m, s.chunks())});
    if (name == "fill") {
      out.push_back({name, "size", to_text(one_f_one_b(r, m)), "the line of rank 0 was changed"});
      out.push_back({name, "schedule", to_text(zb_h1(r, m)), "expected F and B"});
    } else if (s.chunks() == 1) {
      out.push_back({name, "in flight", to_text(gpipe(r, m)), "that is GPipe"});
      out.push_back({name, "bubble", to_text(naive(r, m)), "cause  one micro-batch at a time"});
      out.push_back(
          {name, "bubble", to_text(one_f_one_b(r, m)), p.number == 8 ? "B is not split" : "a rank is idle although"});
    } else if (name != "stages") {
      out.push_back({name, "in flight", to_text(zb_v(r, m)), "rank 0 has"});
      out.push_back({name, "bubble", to_text(v_min(r, m)), "a rank is idle although"});
    }
    Schedule moved = s;
    std::rotate(moved.actions.begin(), moved.actions.begin() + 1, moved.actions.end());
    if (name != "fill") out.push_back({name, "size", to_text(moved), "stages 0, 1 and so on are on ranks"});
    for (size_t i = begin; i < out.size(); ++i) out[i].seed = seed;
  }
  const uint64_t in_order = seed_in_order(puzzle("stages"));
  const Schedule stages = parse_schedule(puzzle("stages").task(in_order).solution, "");
  Schedule slow = empty_schedule("", 2, 2, stages.microbatches);
  for (int i = 0; i < 2 * stages.microbatches; ++i)
    for (const int stage : {0, 1})
      slow.actions[static_cast<size_t>(stage)].push_back({PassKind::F, stage + 2 * (i % 2), i / 2});
  for (int stage = 3; stage >= 0; --stage)
    for (int i = 0; i < stages.microbatches; ++i)
      slow.actions[static_cast<size_t>(stage % 2)].push_back({PassKind::B, stage, i});
  out.push_back({"stages", "bubble", to_text(slow), "a rank is idle although", in_order});
  for (const Section& x : read_sections("puzzle_mistakes.txt")) {
    const Puzzle& p = puzzle(x.fields[0]);
    const std::map<std::string, std::string> ranks{
        {"column-row", "mlp tp=2\nx S(1)\ny I\n"},
        {"heads", "attention tp=4\nx S(1)\ny I\n"},
        {"data-and-tensor", "mlp dp=2 tp=2\nx S(0) S(1)\ny S(0) I\n"},
        {"sequence", "block tp=2\nx S(1)\ny S(1)\nproj.bias S(0)\ndown.bias S(0)\n"}};
    const uint64_t seed = ranks.contains(x.fields[0]) ? seed_with(p, ranks.at(x.fields[0])) : 0;
    const Texts changes = find_changes(x);
    std::string text = changes.empty() ? x.texts[0].second : solution(p, p.task(seed));
    for (const auto& [from, to] : changes) text = changed(text, from, to);
    out.push_back({x.fields[0], x.fields[1], text, x.fields.size() > 2 ? x.fields[2] : "", seed});
  }
  return out;
}

TEST(Puzzles, EachCheckRejectsMistakes) {
  std::map<std::string, std::set<std::string>> diagnosed, refused;
  for (const Attempt& a : mistakes()) {
    const std::string text = verdict_on(puzzle(a.puzzle), a.seed, a.text);
    EXPECT_TRUE(has(text, fmt::format(": not yet\n  failed {}\n", a.bound)) && has(text, a.says))
        << a.bound << ": " << a.says << " of\n"
        << a.text << "\n"
        << text;
    diagnosed[a.puzzle].insert(text.substr(0, text.find("\n\n")));
    refused[a.puzzle].insert(a.bound);
  }
  for (const Puzzle& p : puzzles()) {
    EXPECT_GE(diagnosed[std::string(p.name)].size(), 3U) << p.name;
    std::set<std::string> bounds;
    for (const Bound& bound : p.bounds) bounds.insert(std::string(bound.name));
    if (p.name == "fill" || p.name == "stages") bounds.erase("in flight");  // in-flight is unlimited
    if (p.name == "fill") bounds.erase("bubble");                           // covered by the test below
    if (p.name == "card") bounds.erase("zero");                             // all stages are allowed
    EXPECT_EQ(refused[std::string(p.name)], bounds) << p.name;
    EXPECT_EQ(points(p.bounds, p.bounds.size()), 6) << p.name;
  }
}

// The seed determines the faults of the runs. `parts`: typical output of each fault, in the order of the runs.
TEST(Puzzles, SeedDeterminesRunsAndAnswers) {
  const Puzzle& p = puzzle("traces");
  const char *none = " 0 bytes sent", *half = "all 0.5 times", *same = "unchanged by the step",
             *twice = "231424 bytes sent", *others = "received tokens that differ";
  using Names = std::vector<const char*>;
  for (const auto& [seed, names, parts] :
       {std::tuple(uint64_t{0}, Names{"missing-gradient-sum", "skipped-update", "skipped-microbatch"},
                   Names{none, same, others}),
        {7, {"gradients-divided-twice", "skipped-microbatch", "gradients-summed-twice"}, {half, others, twice}}}) {
    const std::string answers = fmt::format("1 {}\n2 {}\n3 {}\n", names[0], names[1], names[2]);
    EXPECT_TRUE(has(verdict_on(p, seed, answers), "passed score 3 of 3")) << answers;
    const std::string wrong = changed(answers, names[1], names[0]);
    EXPECT_TRUE(has(verdict_on(p, seed, wrong), fmt::format("run 2 is not {}; score 2 of 3", names[0]))) << wrong;
    const std::string runs = p.task(seed).runs();
    for (size_t i = 0; i < 3; ++i) {
      const size_t begin = runs.find(fmt::format("run {}\n", i + 1)), end = runs.find(fmt::format("run {}\n", i + 2));
      for (const char* part : {none, half, same, twice, others})
        EXPECT_EQ(has(runs.substr(begin, end - begin), part), part == parts[i]) << part << " in run " << i << runs;
    }
  }
}

TEST(Puzzles, RejectsMalformedFilesWithOneLineError) {
  for (const Puzzle& p : puzzles()) {
    for (const std::string& text : {std::string(), std::string("\177ELF\0\xff\xfe\n\1", 9), std::string("x\n")}) {
      const std::string verdict = verdict_on(p, 0, text);
      EXPECT_TRUE(has(verdict, "not yet\n  failed ")) << p.name << verdict;
      EXPECT_EQ(verdict.find('\x7f'), std::string::npos) << verdict;
    }
    EXPECT_THROW(grade(p, "/no/such/file"), InputError);
  }
}

// Files of other learners and other puzzles are rejected in a directory.
TEST(Puzzles, RejectsFilesOfOtherPuzzlesAndLearners) {
  const TemporaryDirectory place(temporary_directory() / "tessera-puzzle");
  for (const Puzzle& p : puzzles()) {
    EXPECT_TRUE(p.page.starts_with("# p" + std::to_string(p.number) + ". ")) << p.name;
    EXPECT_LE(std::ranges::count(p.page, '\n'), 44) << p.name;
    const auto directory = place.path() / p.name;
    start(p, directory, 7);
    EXPECT_THROW(start(p, directory), Error);
    EXPECT_TRUE(has(read_file(directory / "README.md"), "\n" + p.task(7).instance + "\n")) << p.name;
    EXPECT_FALSE(grade(p, directory).solved) << p.name;
    EXPECT_EQ(std::filesystem::exists(directory / "runs.txt"), p.file == "answers.txt");
    write_file(directory / p.file, solution(p, p.task(7)));
    EXPECT_TRUE(grade(p, directory).solved) << p.name;
    write_file(directory / p.file, fmt::format("# p{} seed 8\n", p.number) + solution(p, p.task(7)));
    EXPECT_EQ(grade(p, directory).wrong.bound, "seed") << p.name;
    EXPECT_TRUE(has(json(p, grade(p, directory)), R"("seed":7,"broke":"seed")")) << p.name;
    EXPECT_EQ(puzzle_in(directory), &p);
    EXPECT_THROW(grade(puzzle(p.number == 1 ? "p2" : "p1"), directory), InputError);
    std::filesystem::remove(directory / kTaskFile);
    EXPECT_THROW(grade(p, directory), InputError) << p.name;
    EXPECT_FALSE(has(verdict_on(p, 8, solution(p, p.task(7))), ": solved")) << p.name;
  }
  EXPECT_GE(puzzles().size(), 12U);
}

// For every changed placement, the table rejects what a run shows to be wrong.
TEST(PlacementTable, RejectsEveryPlacementRejectedByRun) {
  std::vector<std::string> fields{"R", "I", "P", "S(0)", "S(1)", "S(2)"};
  for (size_t from = 0; from < 6; ++from)
    for (size_t to = 0; to < 6; ++to)
      if (from != to) fields.push_back(fields[from] + "->" + fields[to]);
  const std::string mlp =
      solution(puzzle("column-row"), puzzle("column-row").task(seed_with(puzzle("column-row"), "mlp tp=2")));
  int refused = 0;
  for (const std::string& line : split(mlp, '\n'))
    for (const std::string& word : fields) {
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
