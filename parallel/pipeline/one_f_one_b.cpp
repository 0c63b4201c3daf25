// 1F1B: each rank starts backward passes as early as possible, then alternates forward and backward (Narayanan et al.
// 2019, "PipeDream: generalized pipeline parallelism for DNN training", here with a flush after each step, as in
// Narayanan et al. 2021a, "Memory-efficient pipeline-parallel DNN training").
//
//   rank 0 | F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
//   rank 1 | .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
//   rank 2 | .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..
//
// Rank i runs p - i - 1 warm-up micro-batches; then each new micro-batch waits until an earlier one is complete: p - i
// are in flight instead of GPipe's m, with the same bubble, (p - 1) / (m + p - 1) of the total time.
#include <algorithm>

#include "parallel/pipeline/schedules.h"

namespace tessera {

Schedule one_f_one_b(int ranks, int microbatches) {
  Schedule s = empty_schedule("1f1b", ranks, 1, microbatches);
  for (int r = 0; r < ranks; ++r) {
    auto& list = s.actions[static_cast<size_t>(r)];
    const int ahead = std::min(ranks - r - 1, microbatches);
    for (int i = 0; i < ahead; ++i) list.push_back({PassKind::F, r, i});
    for (int i = 0; i < microbatches; ++i) {
      if (i + ahead < microbatches) list.push_back({PassKind::F, r, i + ahead});
      list.push_back({PassKind::B, r, i});
    }
  }
  return s;
}

}  // namespace tessera
