// ZB-H1 and ZB-H2 split the backward pass: the previous stage waits only for I, the gradient of the input; W, the
// gradients of the weights, runs later and fills the bubble (Qi et al. 2024, "Zero bubble pipeline parallelism",
// section 2).
//
// zb-h1:
//   rank 0 | F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
//   rank 1 | .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
//   rank 2 | .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
//
// zb-h2:
//   rank 0 | F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .. ..
//   rank 1 | .. F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 ..
//   rank 2 | .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
//
// Both follow one rule with two parameters: rank i runs `ahead` warm-up micro-batches, then repeats I, W, F, with W
// `delay` micro-batches after I. A micro-batch is in flight until its W:
//
//            ahead            delay   in flight           bubble
//   zb-h1    p - i            i       p                   p - 1 units of F, I or W: a third of 1F1B's
//   zb-h2    2 (p - i) - 1    2 i     2 p - 1             none inside the span of a rank, from m = 2 p - 1 on
//
// zb-h1 has 1F1B's memory. In zb-h2 the first I returns to rank 0 after 2 p - 1 units, exactly when its warm-up forward
// passes are complete. Ranks start and end one after another, so a step takes p - 1 units more than the work; avoiding
// these would require starting the next step before this one has ended, which global-norm clipping prevents.
#include <algorithm>

#include "parallel/pipeline/schedules.h"

namespace tessera {
namespace {

void add_rank(Schedule& s, int rank, int ahead, int delay) {
  auto& list = s.actions[static_cast<size_t>(rank)];
  const int m = s.microbatches;
  ahead = std::min(ahead, m);
  for (int i = 0; i < ahead; ++i) list.push_back({PassKind::F, rank, i});
  for (int i = 0; i < m; ++i) {
    list.push_back({PassKind::I, rank, i});
    if (i >= delay) list.push_back({PassKind::W, rank, i - delay});
    if (i + ahead < m) list.push_back({PassKind::F, rank, i + ahead});
  }
  for (int i = std::max(0, m - delay); i < m; ++i) list.push_back({PassKind::W, rank, i});
}

}  // namespace

Schedule zb_h1(int ranks, int microbatches) {
  Schedule s = empty_schedule("zb-h1", ranks, 1, microbatches);
  for (int r = 0; r < ranks; ++r) add_rank(s, r, ranks - r, r);
  return s;
}

Schedule zb_h2(int ranks, int microbatches) {
  Schedule s = empty_schedule("zb-h2", ranks, 1, microbatches);
  for (int r = 0; r < ranks; ++r) add_rank(s, r, 2 * (ranks - r) - 1, 2 * r);
  return s;
}

}  // namespace tessera
