// GPipe: all micro-batches forward, then all of them backward (Huang et al. 2019, "GPipe: efficient training of giant
// neural networks using pipeline parallelism", section 2.3).
//
//   rank 0 | F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
//   rank 1 | .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 -- .. ..
//   rank 2 | .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. .. .. ..
//
// A rank waits for p - 1 forward passes in all before or after its own, and for as many backward passes: the bubble is
// (p - 1) / m of the work. All m micro-batches are in flight at once on every rank, which is what later schedules cure.
#include "parallel/pipeline/schedules.h"

namespace tessera {

Schedule gpipe(int ranks, int microbatches) {
  Schedule s = empty_schedule("gpipe", ranks, 1, microbatches);
  for (int r = 0; r < ranks; ++r)
    for (const Do what : {Do::F, Do::B})
      for (int i = 0; i < microbatches; ++i) s.actions[static_cast<size_t>(r)].push_back({what, r, i});
  return s;
}

}  // namespace tessera
