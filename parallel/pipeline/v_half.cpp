// V-Half and V-Min: the V of ZB-V with one half and one third of 1F1B's memory, but a larger bubble than ZB-V's (Qi et
// al. 2024, "Pipeline parallelism with controllable memory", section 3).
//
// A block is the passes of one micro-batch: F down the first leg of the V and up the second, I along the same path, and
// W: on each rank six passes of one unit each. One block begins every six units; if no two passes of a rank's block
// begin at the same time modulo 6, blocks fill a rank without gaps. A micro-batch is in flight from its F to its W, so
// the offsets between ranks determine the memory:
//
//             units from one rank to the next      life on a rank   in flight            bubble of a step, in units
//             F down  F up  I down  I up           both legs        micro-batches
//   v-min     1       1     1       1              about 4 p        floor((p + 4) / 3)   4 p - 5
//   v-half    2       1     2       1              about 6 p        floor((p + 2) / 2)   about 3 p, at most 13 p / 4
//
// The in-flight counts require m to be at least as large. 1F1B's bubble is 6 (p - 1) units. In v-min a slower pass or
// message delays every micro-batch, because ranks have no slack.
//
// v-min, p = 2:
//   rank 0 | 0F0 ... ... 3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2 ... 0I2 0W2
//   rank 1 | ... 1F0 2F0 ... ... 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2
//
// v-half, p = 2:
//   rank 0 | 0F0 ... ... 3F0 0F1 3I0 3W0 3F1 0F2 ... 0I0 3I1 3W1 3F2 3I2 0I1 0W0 0I2 3W2 0W1 0W2
//   rank 1 | ... 1F0 2F0 ... ... 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "parallel/pipeline/schedules.h"
#include "parallel/pipeline/validate.h"

namespace tessera {

namespace {

constexpr int kUnits = 6;  // per block on each rank

struct Block {
  std::array<int, 4> steps;  // units from one rank to the next: F down, F up, I down, I up
  std::array<int, 3> turns;  // units at the turns: down to up, F to I, down to up
};

// The start time of a pass of the first micro-batch on a rank.
struct Begin {
  int at;
  PassKind what;
  int leg;
};

std::vector<Begin> begins(const Block& b, int rank, int ranks) {
  const int last = ranks - 1, back = last - rank;
  const auto [down, up, down_again, up_again] = b.steps;
  const int turn = down * last + b.turns[0], end = turn + up * last + b.turns[1],
            turn_again = end + down_again * last + b.turns[2];
  std::vector<Begin> out = {{down * rank, PassKind::F, 0},
                            {turn + up * back, PassKind::F, 1},
                            {end + down_again * rank, PassKind::I, 1},
                            {turn_again + up_again * back, PassKind::I, 0}};
  std::array<bool, kUnits> taken{};
  for (const Begin& x : out) taken.at(static_cast<size_t>(x.at % kUnits)) = true;
  for (const size_t input : {2, 3}) {  // each W uses the next free unit
    int at = out[input].at + 1;
    while (std::exchange(taken.at(static_cast<size_t>(at % kUnits)), true)) ++at;
    out.push_back({at, PassKind::W, out[input].leg});
  }
  return out;
}

void repeat(Schedule& s, const Block& block, int rank) {
  const std::vector<Begin> all = begins(block, rank, s.ranks);
  std::array<Begin, kUnits> units{};
  for (const Begin& x : all) units.at(static_cast<size_t>(x.at % kUnits)) = x;
  const int end = std::ranges::max(all, {}, &Begin::at).at + kUnits * s.microbatches;
  for (int now = 0; now < end; ++now) {
    const Begin& x = units.at(static_cast<size_t>(now % kUnits));
    if (const int i = (now - x.at) / kUnits; now >= x.at && i < s.microbatches)
      s.actions[static_cast<size_t>(rank)].push_back({x.what, x.leg == 0 ? rank : 2 * s.ranks - 1 - rank, i});
  }
}

// Reorders the passes after each rank's last F, simulated with unit-time passes: I runs as early as possible, because
// other ranks wait for it, and W only when no I can run.
void defer_weights(Schedule& s) {
  ActionTable ends(s);
  std::vector<std::vector<Action>> left;
  std::vector<ptrdiff_t> first(s.actions.size());
  std::vector<int> forwards(s.actions.size(), s.chunks() * s.microbatches);
  size_t count = 0;
  for (auto& list : s.actions) {
    count += list.size();
    left.push_back(std::exchange(list, {}));
  }
  for (int now = 0; count > 0; ++now)
    for (size_t r = 0; r < left.size(); ++r) {
      std::vector<Action>& list = left[r];
      const auto can = [&](const Action& a) {
        return std::ranges::all_of(needs(s, a, false), [&](const Action& n) {
          const double end = ends.of_need(n);
          return end >= 0 && end <= now;
        });
      };
      const auto begin = list.begin() + first[r];
      auto next = begin;
      if (forwards[r] == 0) {
        next = std::find_if(begin, list.end(), [&](const Action& a) { return a.what == PassKind::I && can(a); });
        if (next == list.end()) next = std::find_if(begin, list.end(), can);
      }
      if (next == list.end() || !can(*next)) continue;
      ends[*next] = now + 1;
      forwards[r] -= next->what == PassKind::F;
      s.actions[r].push_back(*next);
      std::rotate(begin, next, next + 1);
      ++first[r];
      --count;
    }
}

Schedule repeated(Schedule s, const Block& block) {
  for (int r = 0; r < s.ranks; ++r) repeat(s, block, r);
  defer_weights(s);
  return s;
}

}  // namespace

// The shortest turns for which no two passes of a rank collide.
Schedule v_min(int ranks, int microbatches) {
  return repeated(empty_v("v-min", ranks, microbatches), {{1, 1, 1, 1}, {1, ranks % 3 == 0 ? 3 : 1, 1}});
}

Schedule v_half(int ranks, int microbatches) {
  return repeated(empty_v("v-half", ranks, microbatches), {{2, 1, 2, 1}, {1, ranks % 2 == 0 ? 4 : 1, 2}});
}

}  // namespace tessera
