// ZB-V: ZB-H2's bubble in ZB-H1's memory (Qi et al. 2024, "Pipeline parallelism with controllable memory", section 3;
// "Zero bubble pipeline parallelism", section 6). Each rank has two chunks, and the stages lie in a V:
//
//   rank 0:  stage 0          stage 5      down one leg and up the other: the first stage and the last are on rank 0,
//   rank 1:    stage 1      stage 4        so a micro-batch begins its backward pass where it began, and where the
//   rank 2:      stage 2  stage 3          memory is. At the turn (2 -> 3) nothing goes over the wire.
//
//   p = 3, m = 6; small letters are the second chunk:
//   rank 0:  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 F5 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 ...
//   rank 1:  .. F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 F5 I1 W1 ...
//   rank 2:  .. .. F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 ...
//
// Rank r fills its two legs, then repeats F I W of the first leg and F I W of the second, and empties them. It never
// has more than 2 p chunks in flight, p micro-batches, the same on every rank; inside the span of a rank nothing is
// idle, from m = 2 p - 1 on.
#include <algorithm>
#include <array>

#include "parallel/pipeline/schedules.h"

namespace tessera {
namespace {

// The list of one rank, written leg by leg. A pass that has no micro-batch left is left out.
class Legs {
 public:
  Legs(Schedule& s, int rank)
      : list_(s.actions[static_cast<size_t>(rank)]),
        stages_{rank, 2 * s.ranks - 1 - rank},
        microbatches_(s.microbatches) {}

  void F(int leg) { add(Do::F, leg, forward_, microbatches_); }
  void I(int leg) { add(Do::I, leg, input_, microbatches_); }
  void W(int leg) { add(Do::W, leg, weight_, input_[static_cast<size_t>(leg)]); }
  void FIW(int forward, int backward) {
    F(forward);
    I(backward);
    W(backward);
  }
  bool forwarded() const { return forward_[1] == microbatches_; }
  bool all_inputs() const { return input_[0] == microbatches_ && input_[1] == microbatches_; }

 private:
  void add(Do what, int leg, std::array<int, 2>& next, int end) {
    const auto at = static_cast<size_t>(leg);
    if (next[at] < end) list_.push_back({what, stages_[at], next[at]++});
  }
  std::vector<Action>& list_;
  std::array<int, 2> stages_, forward_{}, input_{}, weight_{};
  int microbatches_;
};

void add_rank(Schedule& s, int rank) {
  const int after = s.ranks - rank;  // ranks from here to the turn
  Legs legs(s, rank);
  // Fill: until the first micro-batch is back from the turn, then as far as it takes to reach the last stage,
  for (int i = 0; i < 2 * after - 1; ++i) legs.F(0);
  for (int i = 0; i < rank; ++i) {
    legs.F(1);
    legs.F(0);
  }
  // and from there back to this rank: here on the second leg, a weight gradient frees what a forward pass took.
  for (int i = 0; i < after; ++i) legs.FIW(1, 1);
  while (!legs.forwarded()) {
    legs.FIW(0, 0);
    legs.FIW(1, 1);
  }
  // Empty: the ranks before this one wait for I, so W comes last, but no later than it fits between.
  for (int i = 0; i < rank; ++i) {
    legs.I(0);
    legs.I(1);
  }
  for (int i = 0; i < after; ++i) {
    legs.I(0);
    legs.W(0);
  }
  while (!legs.all_inputs()) {
    legs.I(1);
    legs.I(0);
  }
  for (const int leg : {1, 0})
    for (int i = 0; i < s.microbatches; ++i) legs.W(leg);
}

}  // namespace

Schedule zb_v(int ranks, int microbatches) {
  Schedule s = empty_schedule("zb-v", ranks, 2, microbatches);
  for (int stage = ranks; stage < s.stages; ++stage)
    s.rank_of_stage[static_cast<size_t>(stage)] = 2 * ranks - 1 - stage;
  for (int r = 0; r < ranks; ++r) add_rank(s, r);
  return s;
}

}  // namespace tessera
