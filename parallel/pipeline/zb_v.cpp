// ZB-V: ZB-H2's bubble with ZB-H1's memory (Qi et al. 2024, "Pipeline parallelism with controllable memory", section 3;
// "Zero bubble pipeline parallelism", section 6). Each rank has two chunks, with the stages in a V:
//
//   rank 0:  stage 0          stage 5      the first and the last stage are on rank 0, so a micro-batch begins its
//   rank 1:    stage 1      stage 4        backward pass on the rank of its forward pass; the turn (2 -> 3) needs no
//   rank 2:      stage 2  stage 3          message
//
// In steady state a rank alternates F I W of its two legs (docs/strategies/zero_bubble.md). Every rank has at most 2 p
// chunks, that is p micro-batches, in flight; from m = 2 p - 1 on no rank idles between its first and last action.
#include <array>
#include <vector>

#include "parallel/pipeline/schedules.h"

namespace tessera {

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
