// Model parallelism without a pipeline: one micro-batch after another goes forward through all stages and back.
//
//   rank 0 | F0 .. .. .. .. .. .. B0 -- F1 .. .. .. .. .. .. B1 --
//   rank 1 | .. F0 .. .. .. B0 -- .. .. .. F1 .. .. .. B1 -- .. ..
//   rank 2 | .. .. F0 B0 -- .. .. .. .. .. .. F1 B1 -- .. .. .. ..
//
// One rank works at a time, so of the whole the share (p - 1) / p is bubble, however many micro-batches there are. It
// is what one gets by putting layers on several devices and no more, and the yardstick of the others: the least memory.
#include "parallel/pipeline/schedules.h"

namespace tessera {

Schedule naive(int ranks, int microbatches) {
  Schedule s = empty_schedule("naive", ranks, 1, microbatches);
  for (int r = 0; r < ranks; ++r)
    for (int i = 0; i < microbatches; ++i) {
      auto& list = s.actions[static_cast<size_t>(r)];
      list.push_back({Do::F, r, i});
      list.push_back({Do::B, r, i});
    }
  return s;
}

}  // namespace tessera
