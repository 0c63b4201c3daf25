// GPipe: all micro-batches forward, then all of them backward (Huang et al. 2019, "GPipe: efficient training of giant
// neural networks using pipeline parallelism", section 2.3).
//
//   rank 0 | F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
//   rank 1 | .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 -- .. ..
//   rank 2 | .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. .. .. ..
//
// The bubble is (p - 1) / m of the work: each rank idles for p - 1 forward and p - 1 backward passes. All m
// micro-batches are in flight on every rank at once.
#include <cstddef>

#include "parallel/pipeline/schedules.h"

namespace tessera {

Schedule gpipe(int ranks, int microbatches) {
  Schedule s = empty_schedule("gpipe", ranks, 1, microbatches);
  for (int r = 0; r < ranks; ++r)
    for (const PassKind what : {PassKind::F, PassKind::B})
      for (int i = 0; i < microbatches; ++i) s.actions[static_cast<size_t>(r)].push_back({what, r, i});
  return s;
}

}  // namespace tessera
