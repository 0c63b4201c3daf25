// Graders of schedules: validity (complete, no deadlock), micro-batches in flight, and bubble.
#include "parallel/pipeline/schedules.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <regex>
#include <string>
#include <vector>

#include "base/setting.h"
#include "lab/exercise.h"
#include "parallel/pipeline/simulate.h"
#include "parallel/pipeline/validate.h"
#include "tensor/random.h"

namespace tessera::lab {
namespace {

std::string lists(const Schedule& s) {
  std::string out = "  actions of each rank in order (stage, action, micro-batch):\n";
  for (size_t r = 0; r < s.actions.size(); ++r) {
    out += fmt::format("  rank {} |", r);
    for (const Action& a : s.actions[r]) out += " " + a.str();
    out += "\n";
  }
  return out;
}

std::string picture(const Schedule& s) {
  std::string out = "  your schedule over time, B twice as long as F:\n";
  for (const std::string& line : split(draw(simulate(s), 0, 60), '\n')) out += line.empty() ? "" : "  " + line + "\n";
  return out;
}

// Replaces "0F1" by "F of micro-batch 1 on stage 0".
std::string in_words(const std::string& fault) {
  static const std::regex action(R"((-?\d+)([FBIW])(-?\d+))");
  return std::regex_replace(fault, action, "$2 of micro-batch $3 on stage $1");
}

std::string cause_of_fault(const Schedule& s, const std::string& fault) {
  if (std::ranges::all_of(s.actions, [](const auto& list) { return list.empty(); }))
    return "all lists are empty; you may be filling a copy of the list: write `auto& list = ...`, with the `&`";
  const auto says = [&](const char* pattern) { return fault.find(pattern) != std::string::npos; };
  if (says("later on the same rank"))
    return s.has(PassKind::B) ? "a backward pass precedes its forward pass"
                              : "a backward pass precedes its forward pass, or a W before its I";
  if (says("deadlock")) return "a rank runs a backward pass too early, while later ranks wait for its forward passes";
  if (says("is missing")) return "a loop ends too early or starts too late: some micro-batches never get that action";
  if (says("twice")) return "two loops both add that action: one should start where the other ends";
  if (says("fused and split")) return "a backward pass is either one B or an I and a W";
  if (says("ascend")) return "the micro-batches of a stage must be in ascending order";
  if (says("micro-batch") && says("does not exist"))
    return "an index exceeds the last micro-batch, in the warm-up or in the loop after it: the warm-up must not be "
           "longer than the number of micro-batches, and after it each F needs a bounds check";
  return "";
}

struct Expected {
  int in_flight = 0;
  std::string formula, too_many, too_few;
};

void check_sound(const std::string& where, const Schedule& s) {
  if (const auto fault = find_fault(s))
    throw Failure{"schedule", where + ": " + in_words(*fault), cause_of_fault(s, *fault), lists(s)};
}

void check_in_flight(const std::string& where, const Schedule& s, int rank, const Expected& e) {
  const int found = peak_in_flight(s)[rank];
  if (found == e.in_flight) return;
  const auto& list = s.actions[rank];
  const auto first = std::ranges::find_if(list, [](const Action& a) { return a.what != PassKind::F; });
  const bool all = found > e.in_flight && first - list.begin() == s.microbatches;
  throw Failure{
      "memory",
      fmt::format("{}: rank {} has {} micro-batches in flight; expected {} = {}: {} too {}", where, rank, found,
                  e.in_flight, e.formula, std::abs(found - e.in_flight), found > e.in_flight ? "many" : "few"),
      all                   ? "all forward passes precede the first backward pass: that is GPipe"
      : found > e.in_flight ? e.too_many
                            : e.too_few,
      picture(s)};
}

void check_bubble(const std::string& where, const Schedule& s, double expected, const std::string& formula,
                  const std::string& cause) {
  const double found = simulate(s).bubble_fraction();
  if (std::abs(found - expected) < 1e-9) return;
  throw Failure{"bubble",
                fmt::format("{}: bubble {:.4f} of the time; expected {:.4f} = {}", where, found, expected, formula),
                cause, picture(s)};
}

std::string sizes(int p, int m) {
  return fmt::format("{} rank{}, {} micro-batch{}", p, p == 1 ? "" : "s", m, m == 1 ? "" : "es");
}

// Checks fixed sizes and two random ones.
template <class Check>
void each_size(Grading& grading, Schedule (*make)(int ranks, int microbatches), const Check& check) {
  std::vector<std::pair<int, int>> all;
  for (const int p : {3, 1, 2, 4, 6})
    for (const int m : {6, 4, 1, 2, 3, 9}) all.emplace_back(p, m);
  const Philox random(grading.seed());
  for (const uint64_t i : {0, 1}) all.emplace_back(5 + random.below(5, i), 10 + random.below(15, i + 2));
  for (const std::pair<int, int>& size : all) {
    Schedule s = empty_schedule("", size.first, 1, size.second);
    s.actions = grading.ask(s.ranks, [&] { return make(s.ranks, s.microbatches).actions; });
    for (const auto& list : s.actions)
      for (const Action& a : list)
        if (static_cast<int>(a.what) >= kPassKinds) throw NoAnswer();
    grading.check([&] { check(s, s.ranks, s.microbatches); });
  }
}

}  // namespace

PassedChecks grade_1f1b(Grading& grading) {
  each_size(grading, one_f_one_b, [](const Schedule& s, int p, int m) {
    const std::string where = sizes(p, m);
    check_sound(where, s);
    for (int r = 0; r < p; ++r)
      check_in_flight(where, s, r,
                      {std::min(p - r, m), "min(p - r, m)",
                       "too many forward passes first: expected p - r - 1 of them, then F and B alternately",
                       "too few forward passes first: expected p - r - 1 of them, to occupy the rank until the "
                       "first micro-batch returns"});
    check_bubble(where, s, (p - 1.0) / (m + p - 1.0), "(p - 1) / (m + p - 1)",
                 "memory is correct, but the order is wrong: after the warm-up a rank runs F and B alternately");
  });
  return {"complete and free of deadlocks on 1 to 6 ranks with 1 to 9 micro-batches, and larger sizes",
          "in flight on rank r: min(p - r, m) micro-batches", "bubble: (p - 1) / (m + p - 1) of the step"};
}

PassedChecks grade_zb_h1(Grading& grading) {
  each_size(grading, zb_h1, [](const Schedule& s, int p, int m) {
    const std::string where = sizes(p, m);
    check_sound(where, s);
    if (s.has(PassKind::B))
      throw Failure{"schedule", where + ": backward passes are not split; expected I and W", "B is not split",
                    lists(s)};
    for (int r = 0; r < p; ++r)
      check_in_flight(
          where, s, r,
          {std::min(p, m), "min(p, m), counted from F to W",
           "W runs too late: activations are stored until W, so at most r of them may wait on rank r",
           "a W directly follows its I, or too few forward passes run first: W of rank r may be delayed by r "
           "micro-batches without exceeding the memory of rank 0 of 1F1B"});
    if (m < p) return;
    check_bubble(where, s, (p - 1.0) / (3.0 * m + p - 1.0), "(p - 1) / (3 m + p - 1)",
                 "a W must be available to fill idle time, and I must never wait for a W that could run later");
  });
  return {"complete, split and free of deadlocks on 1 to 6 ranks with 1 to 9 micro-batches, and larger sizes",
          "in flight, from F to W: min(p, m) micro-batches", "bubble: (p - 1) / (3 m + p - 1) of the step if m >= p"};
}

}  // namespace tessera::lab
