// Schedules by what they must keep: complete and free of deadlock, so many micro-batches in flight, so large a bubble.
#include "parallel/pipeline/schedules.h"

#include <fmt/format.h>

#include <algorithm>
#include <regex>

#include "lab/exercise.h"
#include "parallel/pipeline/simulate.h"
#include "parallel/pipeline/validate.h"
#include "tensor/random.h"

namespace tessera::lab {
namespace {

std::string lists(const Schedule& s) {
  std::string out = "  what each rank does, in its order, as stage, action and micro-batch:\n";
  for (size_t r = 0; r < s.actions.size(); ++r) {
    out += fmt::format("  rank {} |", r);
    for (const Action& a : s.actions[r]) out += " " + a.str();
    out += "\n";
  }
  return out;
}

std::string picture(const Schedule& s) {
  std::string out = "  your schedule on a clock, B twice as long as F:\n", drawing = draw(simulate(s), 0, 60);
  for (size_t at = 0; at < drawing.size();) {
    const size_t end = std::min(drawing.find('\n', at), drawing.size());
    out += "  " + drawing.substr(at, end - at) + "\n";
    at = end + 1;
  }
  return out;
}

// "0F1" as "F of micro-batch 1 on stage 0".
std::string in_words(const std::string& fault) {
  static const std::regex action(R"((-?\d+)([FBIW])(-?\d+))");
  return std::regex_replace(fault, action, "$2 of micro-batch $3 on stage $1");
}

std::string cause_of_fault(const Schedule& s, const std::string& fault) {
  if (std::ranges::all_of(s.actions, [](const auto& list) { return list.empty(); }))
    return "all lists are empty. Perhaps you fill a copy of the list: write `auto& list = ...`, with the `&`";
  const auto says = [&](const char* words) { return fault.find(words) != std::string::npos; };
  if (says("later on the same rank"))
    return s.has(PassKind::B) ? "a backward pass comes before the forward pass that it needs"
                              : "a backward pass comes before the forward pass that it needs, or a W before its I";
  if (says("deadlock"))
    return "ranks wait for each other: a rank goes backward too early, while the ranks after it still need its forward "
           "passes";
  if (says("is missing")) return "a loop ends too early, or begins too late: some micro-batches never get that action";
  if (says("twice")) return "two loops both make that action: one should begin where the other has ended";
  if (says("fused and split")) return "a backward pass is either one B or an I and a W";
  if (says("ascend")) return "micro-batches of a stage go in their order";
  if (says("micro-batch") && says("does not exist"))
    return "an index runs past the last micro-batch, in the warm-up or in the loop after it. The warm-up must not be "
           "longer than there are micro-batches, and after it an F needs a test whether its micro-batch exists";
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
      fmt::format("{}: rank {} has {} micro-batches in flight at once; expected {} = {}: {} too {}", where, rank, found,
                  e.in_flight, e.formula, std::abs(found - e.in_flight), found > e.in_flight ? "many" : "few"),
      all                   ? "all micro-batches go forward before the first goes backward: that is GPipe"
      : found > e.in_flight ? e.too_many
                            : e.too_few,
      picture(s)};
}

void check_bubble(const std::string& where, const Schedule& s, double expected, const std::string& formula,
                  const std::string& cause) {
  const double found = simulate(s).bubble_share();
  if (std::abs(found - expected) < 1e-9) return;
  throw Failure{
      "bubble",
      fmt::format("{}: ranks are idle for {:.4f} of the time; expected {:.4f} = {}", where, found, expected, formula),
      cause, picture(s)};
}

std::string sizes(int p, int m) {
  return fmt::format("{} rank{}, {} micro-batch{}", p, p == 1 ? "" : "s", m, m == 1 ? "" : "es");
}

// Checks schedules of sizes that are known, and of two that nobody knows before.
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
                       "the rank makes too many forward passes first: expected p - r - 1 of them, then F and B in turn",
                       "the rank makes too few forward passes first: expected p - r - 1 of them, so that it has work "
                       "while the first micro-batch travels to the end and back"});
    check_bubble(where, s, (p - 1.0) / (m + p - 1.0), "(p - 1) / (m + p - 1)",
                 "the memory is right, but the order is wrong: after the warm-up a rank does F and B in turn");
  });
  return {"complete, and free of deadlock, on 1 to 6 ranks with 1 to 9 micro-batches, and on more",
          "in flight on rank r: min(p - r, m) micro-batches", "bubble: (p - 1) / (m + p - 1) of the total time"};
}

PassedChecks grade_zb_h1(Grading& grading) {
  each_size(grading, zb_h1, [](const Schedule& s, int p, int m) {
    const std::string where = sizes(p, m);
    check_sound(where, s);
    if (s.has(PassKind::B))
      throw Failure{"schedule", where + ": there are whole backward passes; expected I and W", "B is not split",
                    lists(s)};
    for (int r = 0; r < p; ++r)
      check_in_flight(
          where, s, r,
          {std::min(p, m), "min(p, m), counted from F to W",
           "W's come too late: the activations of an F are kept until its W, so at most r of them may wait on rank r",
           "a W comes at once after its I, or the rank makes too few forward passes first: the W's of rank r may be "
           "r micro-batches behind, and it still keeps no more than rank 0 of 1F1B"});
    if (m < p) return;
    check_bubble(
        where, s, (p - 1.0) / (3.0 * m + p - 1.0), "(p - 1) / (3 m + p - 1)",
        "when a rank would wait, a W must be ready to fill the time; and I must never wait for a W that could come "
        "later");
  });
  return {"complete, split, and free of deadlock, on 1 to 6 ranks with 1 to 9 micro-batches, and on more",
          "in flight, from F to W: min(p, m) micro-batches", "bubble: (p - 1) / (3 m + p - 1) of the time if m >= p"};
}

}  // namespace tessera::lab
