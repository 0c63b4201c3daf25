// Eager 1F1B: 1F1B that goes twice as far ahead, so that messages travel while their receiver has other work (Zhuang et
// al. 2023, "On optimizing the communication of model parallelism", section 4).
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
// A worked example: docs/adding_a_strategy.md goes through it. Rank i of p has min(m, 2 (p - i) - 1) of m micro-batches
// in flight; 1F1B has min(m, p - i). If messages take no time, both take equally long.
#pragma once
#include <algorithm>

#include "parallel/pipeline/schedule.h"

namespace tessera {

inline Schedule eager_1f1b(int ranks, int microbatches) {
  Schedule s = empty_schedule("eager-1f1b", ranks, 1, microbatches);
  for (int r = 0; r < ranks; ++r) {
    auto& list = s.actions[static_cast<size_t>(r)];
    const int ahead = std::min(2 * (ranks - r - 1), microbatches);  // 1F1B: ranks - r - 1
    for (int i = 0; i < ahead; ++i) list.push_back({Do::F, r, i});
    for (int i = 0; i < microbatches; ++i) {
      if (i + ahead < microbatches) list.push_back({Do::F, r, i + ahead});
      list.push_back({Do::B, r, i});
    }
  }
  return s;
}

}  // namespace tessera
