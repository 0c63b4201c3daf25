// Limits of schedule puzzles, from Tessera's schedules and a local search that starts from them.
#include "lab/schedule_task.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "parallel/pipeline/schedules.h"
#include "parallel/pipeline/validate.h"
#include "tensor/random.h"

namespace tessera::lab {
namespace {

constexpr int kMoves = 1000;
constexpr double kNever = std::numeric_limits<double>::infinity();

// Infinite if the schedule violates the task (except for the time limit).
double end_time(const Schedule& s, const ScheduleTask& t) {
  if (find_fault(s)) return kNever;
  const std::vector<int> peaks = peak_in_flight(s);
  for (size_t r = 0; r < peaks.size(); ++r)
    if (peaks[r] > t.in_flight[r]) return kNever;
  return simulate(s, t.times).makespan;
}

// Merges I and W into B.
Schedule joined(Schedule s) {
  for (auto& list : s.actions) {
    std::erase_if(list, [](const Action& a) { return a.what == PassKind::W; });
    for (Action& a : list) a.what = a.what == PassKind::I ? PassKind::B : a.what;
  }
  return s;
}

// Local search over moves of single actions that do not increase the step time.
Schedule improved(Schedule s, const ScheduleTask& t, const Philox& random) {
  double end = end_time(s, t);
  for (uint64_t move = 0; move < kMoves; ++move) {
    const auto pick = [&](uint64_t what, size_t below) {
      return static_cast<std::ptrdiff_t>(random.below(below, 4 * move + what));
    };
    Schedule other = s;
    auto& list = other.actions[static_cast<size_t>(pick(0, s.actions.size()))];
    const auto from = list.begin() + pick(1, list.size()), to = std::min(from + 1 + pick(2, 6), list.end());
    pick(3, 2) == 0 ? std::rotate(from, from + 1, to) : std::rotate(from, to - 1, to);
    if (const double ends = end_time(other, t); ends <= end) s = std::move(other), end = ends;
  }
  return s;
}

// Moves the stages of rank r to rank order[r].
void relabel(ScheduleTask& t, const std::vector<int>& order) {
  const ScheduleTask from = t;
  for (int& rank : t.known.rank_of_stage) rank = order[static_cast<size_t>(rank)];
  for (size_t r = 0; r < order.size(); ++r) {
    const auto to = static_cast<size_t>(order[r]);
    t.known.actions[to] = from.known.actions[r], t.in_flight[to] = from.in_flight[r];
  }
}

// Generates a list for rank 0 of two ranks that differs from Tessera's schedules, and finds rank 1's best list by
// exhaustive search. A mask has one bit per list position: F or B.
bool assign_rank_0(ScheduleTask& t, int microbatches, const Philox& random, uint64_t i) {
  const auto make_list = [&](int rank, uint64_t mask) {
    std::vector<Action> list;
    for (int place = 0, f = 0, b = 0; place < 2 * microbatches; ++place) {
      const bool forward = mask >> place & 1;
      if (forward ? f == microbatches : b == f) return std::vector<Action>();
      list.push_back(forward ? Action{PassKind::F, rank, f++} : Action{PassKind::B, rank, b++});
    }
    return list;
  };
  const uint64_t masks = uint64_t{1} << 2 * microbatches;
  Schedule s = empty_schedule("", 2, 1, microbatches);
  s.actions[0] = make_list(0, random.below(masks, i));
  for (const Schedule& made : builtin_schedules(2, microbatches))
    if (made.actions[0] == s.actions[0]) return false;
  t.makespan = kNever;
  for (uint64_t mask = 0; mask < masks && !s.actions[0].empty(); ++mask)
    if (s.actions[1] = make_list(1, mask); !s.actions[1].empty() && end_time(s, t) < t.makespan)
      t.known = s, t.makespan = end_time(s, t);
  t.is_given = true;
  return t.makespan < kNever;
}

}  // namespace

std::vector<Schedule> builtin_schedules(int ranks, int microbatches) {
  std::vector<Schedule> out;
  for (size_t kind = 0; kind < kScheduleNames.size(); ++kind)
    for (const int chunks : {0, 1, 2}) try {
        out.push_back(make_schedule(static_cast<ScheduleKind>(kind), ranks, microbatches, chunks));
      } catch (const Error&) {  // does not support these sizes
      }
  return out;
}

ScheduleTask make_task(const ScheduleFamily& f, uint64_t seed) {
  const Philox random = Philox::named(seed, std::string(f.name));
  for (uint64_t i = 0;; ++i) {
    const auto pick = [&](uint64_t what, int min, int max) {
      return min + static_cast<int>(random.below(static_cast<uint64_t>(max - min + 1), 64 * i + what));
    };
    const int m = pick(0, f.min_microbatches, f.max_microbatches);
    ScheduleTask t;
    t.times.stages.clear();
    t.times.message = f.assigns_rank_0 ? 0 : pick(1, 0, 1);
    for (int stage = 0; stage < f.ranks * f.chunks; ++stage) {
      const double one = f.assigns_rank_0 ? 1 : pick(2 + static_cast<uint64_t>(stage), 2, 3);
      t.times.stages.push_back({one, 2 * one, one, one});
    }
    for (int r = 0; r < f.ranks; ++r)
      t.in_flight.push_back(f.in_flight > 0 ? static_cast<int>((f.in_flight - r * f.decrease_per_rank) * f.chunks)
                                            : m * f.chunks);
    if (f.assigns_rank_0) {
      if (assign_rank_0(t, m, random, 64 * i + 63)) return t;
      continue;
    }
    double made = kNever, first = kNever;
    const bool any = f.chunks == 1 || f.splits,
               is_v = pick(30, 0, 1) == 1;  // whether the last stage is on the rank of the first
    for (const Schedule& s : builtin_schedules(f.ranks, m)) {
      if (s.chunks() != f.chunks) continue;
      if (f.splits || !s.has(PassKind::W)) made = std::min(made, end_time(s, t));
      for (const Schedule& from : {f.splits ? s : joined(s), f.splits && s.has(PassKind::B) ? split_backward(s) : s})
        if ((any || (s.rank_of_stage.back() == 0) == is_v) && (f.splits || !from.has(PassKind::W)) &&
            end_time(from, t) < first)
          first = end_time(from, t), t.known = from;
    }
    if (first == kNever) continue;
    t.known = improved(t.known, t, Philox::named(seed + i, "moves"));
    const double best = end_time(t.known, t);
    if (made < best + 2) continue;
    t.makespan = std::floor(std::min(made == kNever ? best * 1.1 : made - 1, (best + std::min(made, best * 1.2)) / 2));
    std::vector<int> order(static_cast<size_t>(f.ranks));
    std::iota(order.begin(), order.end(), 0);
    for (int r = f.ranks - 1; r > 0; --r)
      std::swap(order[static_cast<size_t>(r)], order[static_cast<size_t>(pick(31 + static_cast<uint64_t>(r), 0, r))]);
    relabel(t, order);
    return t;
  }
}

}  // namespace tessera::lab
