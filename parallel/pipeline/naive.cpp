// No pipelining: each micro-batch passes forward through all stages and back before the next.
//
//   rank 0 | F0 .. .. .. .. .. .. B0 -- F1 .. .. .. .. .. .. B1 --
//   rank 1 | .. F0 .. .. .. B0 -- .. .. .. F1 .. .. .. B1 -- .. ..
//   rank 2 | .. .. F0 B0 -- .. .. .. .. .. .. F1 B1 -- .. .. .. ..
//
// One rank works at a time, so the bubble fraction is (p - 1) / p for any number of micro-batches: the baseline for the
// other schedules, with minimum memory.
#include <cstddef>

#include "parallel/pipeline/schedules.h"

namespace tessera {

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

}  // namespace tessera
