// ZB-V: ZB-H2's span with ZB-H1's memory (Qi et al. 2024, "Pipeline parallelism with controllable memory", section 3;
// "Zero bubble pipeline parallelism", section 6). Each rank has two chunks, with the stages in a V:
//
//   rank 0:  stage 0          stage 5      the first and the last stage are on rank 0, so a micro-batch begins its
//   rank 1:    stage 1      stage 4        backward pass on the rank of its forward pass; the turn (2 -> 3) needs no
//   rank 2:      stage 2  stage 3          message
//
// p = 2:
//   rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 ...
//   rank 1 | ... 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
//
// In steady state a rank alternates F I W between its two legs. Every rank has at most 2 p chunks, that is p
// micro-batches, in flight; from m = 2 p - 1 on no rank idles between its first and last action.
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
  // Cooldown: earlier ranks wait for I, so W runs last or in gaps.
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
