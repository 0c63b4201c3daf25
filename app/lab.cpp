// The command `lab`.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "app/commands.h"
#include "app/output.h"
#include "lab/check.h"
#include "lab/puzzle.h"

namespace tessera {
namespace {

std::string list() {
  std::string out = "Puzzles: write a file, no C++ needed\n";
  const auto add = [&](const lab::Assignment& a) {
    out += fmt::format("  {:>3}  {:<16} {:<52} {}\n", a.label(), a.name, a.title(), a.file);
  };
  std::ranges::for_each(lab::puzzles(), add);
  out += "\nExercises: write a C++ function\n";
  std::ranges::for_each(lab::exercises(), add);
  return out + "\ntessera lab start N DIR creates its directory; tessera lab check N DIR grades it.\n";
}

int print_verdict(const lab::Verdict& verdict, const std::string& text) {
  print(text);
  return verdict.solved ? 0 : static_cast<int>(Status::verification);
}

// Prints points by puzzle and exercise, one row per learner as soon as all the learner's submissions are graded; as
// JSON, one line per submission and one per learner. Grading continues after errors in a submission.
int check_class(const LabOptions& o) {
  const auto all = lab::handed_in(o.all);
  const bool as_text = o.format == "text";
  std::vector<std::string> names;
  size_t width = 7;
  int of = 0;
  const auto add = [&](const lab::Assignment& a) {
    names.push_back(a.label()), of += lab::points(a.bounds, a.bounds.size());
  };
  std::ranges::for_each(lab::puzzles(), add), std::ranges::for_each(lab::exercises(), add);
  for (const auto& [learner, handed_in] : all) width = std::max(width, learner.size());
  std::string line = fmt::format("{:<{}}", "learner", width), notes;
  for (const std::string& name : names) line += fmt::format(" {:>3}", name);
  if (as_text) print(line + "   all\n");
  std::map<std::pair<int, uint64_t>, std::string> seeds;  // puzzle seeds, each with its first learner
  for (const auto& [learner, handed_in] : all) {
    std::map<std::string, int> points;
    int solved = 0;
    Progress progress(Progress::for_stderr(0, false));
    for (const auto& [e, p, directory] : handed_in) {
      const lab::Assignment& a = p ? static_cast<const lab::Assignment&>(*p) : *e;
      progress.work(fmt::format("grading {} of {}", a.name, learner));
      lab::Verdict verdict;
      try {
        verdict = p ? lab::grade(*p, directory) : lab::check(*e, directory);
      } catch (const std::exception& error) {
        verdict.wrong = {"error", error.what(), ""};
      }
      if (p && verdict.seed)
        if (const auto& [first, is_new] = seeds.try_emplace({p->number, *verdict.seed}, learner);
            !is_new && first->second != learner)
          verdict.notes.push_back("has the same seed as " + first->second + ": the same task was submitted twice");
      const std::string name = a.label();
      points[name] = std::max(points[name], lab::points(a.bounds, verdict.passed));
      solved += verdict.solved;
      for (const std::string& note : verdict.notes) notes += fmt::format("note: {}, {}: {}\n", learner, name, note);
      if (!as_text) print(lab::json(a, verdict, learner));
    }
    int sum = 0;
    line = fmt::format("{:<{}}", learner, width);
    for (const std::string& name : names) {
      const auto found = points.find(name);
      line += fmt::format(" {:>3}", found == points.end() ? "-" : std::to_string(found->second));
      sum += found == points.end() ? 0 : found->second;
    }
    print(as_text ? fmt::format("{} {:>5}\n", line, sum)
                  : nlohmann::ordered_json{{"learner", learner}, {"points", sum}, {"of", of}, {"solved", solved}}.dump(
                        -1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) +
                        "\n");
  }
  if (as_text) print(notes);
  return 0;
}

}  // namespace

int run(const LabOptions& o) {
  using Subcommand = LabOptions::Action;
  if (o.action == Subcommand::list) {
    print(list());
    return 0;
  }
  if (!o.all.empty() && !o.exercise.empty())
    bad_usage("--all: cannot be combined with an exercise, got '{}'", o.exercise);
  if (!o.all.empty()) return check_class(o);
  if (o.action == Subcommand::check && o.directory.empty())
    bad_usage("lab check: expected N and DIR, or --all with a directory");
  const bool as_json = o.format == "json";
  if (const lab::Puzzle* p = lab::find_puzzle(o.exercise)) {
    if (o.action == Subcommand::check) {
      const lab::Verdict verdict = lab::grade(*p, o.directory);
      return print_verdict(verdict, as_json ? lab::json(*p, verdict) : verdict.text);
    }
    if (o.action != Subcommand::start) throw Error("lab grade: expected a C++ exercise; use lab check to grade a file");
    lab::start(*p, o.directory);
  } else {
    const lab::Exercise& e = lab::exercise(o.exercise);
    if (o.action == Subcommand::answer) {
      lab::answer(e);
      return 0;
    }
    if (o.action != Subcommand::start) {
      std::optional<Progress> progress;
      progress.emplace(Progress::for_stderr(0, false)).work(fmt::format("building and grading {}", e.name));
      const lab::Verdict verdict = o.action == Subcommand::grade ? lab::grade(e) : lab::check(e, o.directory);
      progress.reset();
      return print_verdict(verdict, as_json ? lab::json(e, verdict) : verdict.text);
    }
    lab::give_out(e, o.directory);
  }
  print(fmt::format("{0}: README.md describes the task; tessera lab check {1} {0} grades the solution\n",
                    one_line(o.directory), o.exercise));
  return 0;
}

}  // namespace tessera
