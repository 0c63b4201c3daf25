// Eager 1F1B: 1F1B with about twice as many micro-batches in flight, so that messages overlap with other work of their
// receiver (Zhuang et al. 2023, "On optimizing the communication of model parallelism", section 4).
//
//   a message takes one unit, F one, B two:
//
//   1f1b
//   rank 0 | F0 F1 .. .. .. .. B0 -- F2 B1 -- F3 .. .. B2 -- .. B3 --
//   rank 1 | .. .. F0 B0 -- F1 B1 -- .. .. F2 B2 -- F3 B3 -- .. .. ..
//
//   eager-1f1b
//   rank 0 | F0 F1 F2 .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
//   rank 1 | .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. ..
//
// A worked example, explained in docs/adding_a_strategy.md. Rank i of p has min(m, 2 (p - i) - 1) of m micro-batches in
// flight; 1F1B has min(m, p - i). If messages take no time, both have the same step time.
#pragma once
#include <utility>

#include "parallel/pipeline/schedules.h"

namespace tessera {

inline Schedule eager_1f1b(int ranks, int microbatches) {
  Schedule s = one_f_one_b(ranks, microbatches);
  s.name = "eager-1f1b";
  for (int r = 0; r < ranks; ++r) {
    auto& list = s.actions[static_cast<size_t>(r)];
    for (size_t i = 1; i < list.size(); ++i) {  // move F ahead of at most one B per later rank
      int moves = ranks - r - 1;
      for (size_t at = i; at > 0 && list[at].what == PassKind::F && list[at - 1].what == PassKind::B && moves > 0;
           --at, --moves)
        std::swap(list[at - 1], list[at]);
    }
  }
  return s;
}

}  // namespace tessera
