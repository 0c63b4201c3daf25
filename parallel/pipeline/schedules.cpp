// Schedule generators.
#include "parallel/pipeline/schedules.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <deque>

#include "base/error.h"
#include "parallel/pipeline/validate.h"

namespace tessera {

namespace {

bool is_path(const std::string& text) { return text.find_first_of("./") != std::string::npos; }

constexpr int kDefaultChunks = 2;

// `chunks` is the number per rank; 0 if configurable.
struct Known {
  std::function<Schedule(int ranks, int microbatches, int chunks)> make;
  int chunks = 1;
};

template <class Generator>
Known of(Generator make, int chunks = 1) {
  return {[make](int ranks, int microbatches, int) { return make(ranks, microbatches); }, chunks};
}

const Known& known(ScheduleKind kind) {
  static const std::array<Known, kScheduleNames.size()> all{of(naive),        of(gpipe),     of(one_f_one_b),
                                                            {interleaved, 0}, of(zb_h1),     of(zb_h2),
                                                            of(zb_v, 2),      of(v_half, 2), of(v_min, 2)};
  return all.at(static_cast<size_t>(kind));
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names(kScheduleNames.begin(), kScheduleNames.end());
  return names;
}

Schedule make_schedule(ScheduleKind kind, int ranks, int microbatches, int chunks) {
  const Known& one = known(kind);
  if (one.chunks != 0 && chunks != 0 && chunks != one.chunks)
    throw Error(fmt::format("[schedule] {} has {} chunk{} per rank, got {}; only interleaved supports other numbers",
                            name_in(kScheduleNames, kind), one.chunks, one.chunks == 1 ? "" : "s", chunks));
  return one.make(ranks, microbatches, chunks == 0 ? kDefaultChunks : chunks);
}

Schedule schedule_from_file(const std::string& path, int ranks, int microbatches, int chunks) {
  Schedule s = read_schedule(path);
  const auto check = [&](const char* what, int asked, int found) {
    if (asked != found)
      throw Error(fmt::format("[schedule] {} is for {} {}; the plan has {}", path, found, what, asked));
  };
  check("ranks", ranks, s.ranks);
  check("micro-batches", microbatches, s.microbatches);
  if (chunks != 0) check("chunks per rank", chunks, s.chunks());
  return s;
}

NamedSchedule schedule_named(const std::string& name_or_path) {
  if (is_path(name_or_path)) return {.file = name_or_path};
  if (const auto kind = value_named<ScheduleKind>(kScheduleNames, name_or_path)) return {.kind = *kind};
  throw Error(fmt::format("[schedule] unknown schedule '{}'; expected {}, or the path of a file{}", name_or_path,
                          fmt::join(kScheduleNames, ", "), did_you_mean(name_or_path, schedule_names())));
}

Schedule make_schedule(const std::string& name_or_path, int ranks, int microbatches, int chunks) {
  const NamedSchedule named = schedule_named(name_or_path);
  return named.file.empty() ? make_schedule(named.kind, ranks, microbatches, chunks)
                            : schedule_from_file(named.file, ranks, microbatches, chunks);
}

// No pipelining: each micro-batch passes forward through all stages and back before the next.
//
//   rank 0 | F0 .. .. .. .. .. .. B0 -- F1 .. .. .. .. .. .. B1 --
//   rank 1 | .. F0 .. .. .. B0 -- .. .. .. F1 .. .. .. B1 -- .. ..
//   rank 2 | .. .. F0 B0 -- .. .. .. .. .. .. F1 B1 -- .. .. .. ..
//
// One rank works at a time, so the bubble fraction is (p - 1) / p for any number of micro-batches: the result of only
// placing layers on several devices, and the baseline of the other schedules, with minimum memory.

Schedule naive(int ranks, int microbatches) {
  Schedule s = empty_schedule("naive", ranks, 1, microbatches);
  for (int r = 0; r < ranks; ++r)
    for (int i = 0; i < microbatches; ++i) {
      auto& list = s.actions[static_cast<size_t>(r)];
      list.push_back({PassKind::F, r, i});
      list.push_back({PassKind::B, r, i});
    }
  return s;
}

// GPipe: all micro-batches forward, then all of them backward (Huang et al. 2019, "GPipe: efficient training of giant
// neural networks using pipeline parallelism", section 2.3).
//
//   rank 0 | F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
//   rank 1 | .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 -- .. ..
//   rank 2 | .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. .. .. ..
//
// The bubble is (p - 1) / m of the work: each rank idles for p - 1 forward and p - 1 backward passes. All m
// micro-batches are in flight on every rank at once.

Schedule gpipe(int ranks, int microbatches) {
  Schedule s = empty_schedule("gpipe", ranks, 1, microbatches);
  for (int r = 0; r < ranks; ++r)
    for (const PassKind what : {PassKind::F, PassKind::B})
      for (int i = 0; i < microbatches; ++i) s.actions[static_cast<size_t>(r)].push_back({what, r, i});
  return s;
}

// Interleaved 1F1B: each rank has v non-adjacent chunks of layers, so a micro-batch visits each rank v times, and
// warm-up and cooldown take the time of chunks instead of full stages (Narayanan et al. 2021, "Efficient large-scale
// language model training on GPU clusters using Megatron-LM", section 2.2).
//
//   p = 2, v = 2:  rank 0 has stages 0 and 2, rank 1 has stages 1 and 3
//
//   rank 0 | 0F0 0F1 2F0 2F1 ... ... 2B0 --- ... 2B1 --- 0B0 --- 0B1 ---
//   rank 1 | ... 1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1B0 --- 1B1 --- ... ...
//
// Each group of p micro-batches passes chunk 0, then chunk 1, ..., before the next group. The bubble is (p - 1) / (v
// m), v times smaller; there are v times more messages, and rank 0 has p + (p - 1) / v micro-batches in flight.

namespace {

// The k-th of a rank's microbatches x chunks passes.
struct PassOrder {
  int ranks, chunks;
  int microbatch(int k) const { return k / (ranks * chunks) * ranks + k % ranks; }
  int chunk_forward(int k) const { return k % (ranks * chunks) / ranks; }
  int chunk_backward(int k) const { return chunks - 1 - chunk_forward(k); }
};

}  // namespace

Schedule interleaved(int ranks, int microbatches, int chunks) {
  Schedule s = empty_schedule("interleaved", ranks, chunks, microbatches);
  if (microbatches % ranks != 0) {
    const int below = microbatches / ranks * ranks, above = below + ranks;
    throw Error(fmt::format(
        "[schedule] interleaved: {} micro-batches are not a multiple of {} ranks; nearest valid value: {}{}",
        microbatches, ranks, below > 0 ? fmt::format("{} or ", below) : "", above));
  }
  const PassOrder order{ranks, chunks};
  const int total = microbatches * chunks;
  for (int r = 0; r < ranks; ++r) {
    auto& list = s.actions[static_cast<size_t>(r)];
    const auto forward = [&](int k) {
      list.push_back({PassKind::F, order.chunk_forward(k) * ranks + r, order.microbatch(k)});
    };
    // One group reaches the last chunk; twice the number of later ranks covers the way there and back.
    const int ahead = std::min((chunks - 1) * ranks + 2 * (ranks - r - 1), total);
    for (int k = 0; k < ahead; ++k) forward(k);
    for (int k = 0; k < total; ++k) {
      if (k + ahead < total) forward(k + ahead);
      list.push_back({PassKind::B, order.chunk_backward(k) * ranks + r, order.microbatch(k)});
    }
  }
  return s;
}

// V-Half and V-Min: the V of ZB-V with one half and one third of 1F1B's memory, for a larger bubble than ZB-V's (Qi et
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
// In flight for m of at least that many. 1F1B's bubble is 6 (p - 1) units. In v-min a slower pass or message delays
// every micro-batch, because ranks have no slack. docs/strategies/zero_bubble.md shows both.

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

// After a rank's last F, I runs as early as possible, because other ranks wait for it, and W when no I can run, on a
// clock with unit-time passes.
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

// ZB-V: ZB-H2's bubble with ZB-H1's memory (Qi et al. 2024, "Pipeline parallelism with controllable memory", section 3;
// "Zero bubble pipeline parallelism", section 6). Each rank has two chunks, with the stages in a V:
//
//   rank 0:  stage 0          stage 5      the first and the last stage are on rank 0, so a micro-batch begins its
//   rank 1:    stage 1      stage 4        backward pass on the rank of its forward pass; the turn (2 -> 3) needs no
//   rank 2:      stage 2  stage 3          message
//
// In steady state a rank alternates F I W of its two legs (docs/strategies/zero_bubble.md). Every rank has at most 2 p
// chunks, that is p micro-batches, in flight; from m = 2 p - 1 on no rank idles between its first and last action.

namespace {

// Passes beyond the last micro-batch are omitted.
class Legs {
 public:
  Legs(Schedule& s, int rank)
      : list_(s.actions[static_cast<size_t>(rank)]),
        stages_{rank, 2 * s.ranks - 1 - rank},
        microbatches_(s.microbatches) {}

  void forward(int leg) { add(PassKind::F, leg, forward_, microbatches_); }
  void input(int leg) { add(PassKind::I, leg, input_, microbatches_); }
  void weight(int leg) { add(PassKind::W, leg, weight_, input_[static_cast<size_t>(leg)]); }
  void all_three(int leg) {
    forward(leg);
    input(leg);
    weight(leg);
  }
  bool forwarded() const { return forward_[1] == microbatches_; }
  bool all_inputs() const { return input_[0] == microbatches_ && input_[1] == microbatches_; }

 private:
  void add(PassKind what, int leg, std::array<int, 2>& next, int end) {
    const auto at = static_cast<size_t>(leg);
    if (next[at] < end) list_.push_back({what, stages_[at], next[at]++});
  }
  std::vector<Action>& list_;
  std::array<int, 2> stages_, forward_{}, input_{}, weight_{};
  int microbatches_;
};

void add_rank(Schedule& s, int rank) {
  const int after = s.ranks - rank;  // ranks until the turn
  Legs legs(s, rank);
  // Warm-up: until the first micro-batch is back from the turn, then until it reaches the last stage,
  for (int i = 0; i < 2 * after - 1; ++i) legs.forward(0);
  for (int i = 0; i < rank; ++i) {
    legs.forward(1);
    legs.forward(0);
  }
  // and back to this rank: on the second leg, a weight gradient frees the memory of a forward pass.
  for (int i = 0; i < after; ++i) legs.all_three(1);
  while (!legs.forwarded()) {
    legs.all_three(0);
    legs.all_three(1);
  }
  // Cooldown: earlier ranks wait for I, so W runs last, but fills gaps.
  for (int i = 0; i < rank; ++i) {
    legs.input(0);
    legs.input(1);
  }
  for (int i = 0; i < after; ++i) {
    legs.input(0);
    legs.weight(0);
  }
  while (!legs.all_inputs()) {
    legs.input(1);
    legs.input(0);
  }
  for (const int leg : {1, 0})
    for (int i = 0; i < s.microbatches; ++i) legs.weight(leg);
}

}  // namespace

Schedule zb_v(int ranks, int microbatches) {
  Schedule s = empty_v("zb-v", ranks, microbatches);
  for (int r = 0; r < ranks; ++r) add_rank(s, r);
  return s;
}

}  // namespace tessera
