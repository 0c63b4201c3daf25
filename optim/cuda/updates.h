// Updates on a GPU: one launch for each unit, or for each 64 of its slots.
#pragma once
#include "optim/updates.h"

namespace tessera::cuda {

// W is float or double, the type of the unit's state, which may lie in the host's pinned memory. With the numbers of
// the step that the kernel finds at `now` when it runs, or, where that is null, those that are in `step`. Queued on the
// stream of the unit's arena.
template <class W>
void adam(const FlatUnit& unit, const AdamState& state, const AdamStep<W>& step, const UpdateNumbers* now);
template <class W>
void sgd(const FlatUnit& unit, const SgdState& state, const SgdStep<W>& step, const UpdateNumbers* now);

}  // namespace tessera::cuda
