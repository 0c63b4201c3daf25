// How an update on the CPU reaches the elements of a unit: slot by slot, on the rank's threads.
#pragma once
#include <algorithm>

#include "nn/parameter.h"
#include "tensor/cpu/vectorize.h"

namespace tessera {

// Runs f(begin, end, slot), vectorised, on ranges that together are the elements of the unit's slots, each in one
// slot. Cut evenly over the threads; a slot that reaches past the unit's buffers is clipped to them.
template <class F>
void for_each_segment(const FlatUnit& unit, const F& f) {
  const int64_t n = unit.values.numel();
  const Slot* const first = unit.slots.data();
  const Slot* const last = first + unit.slots.size();
  cpu::split(n, cpu::kGrain, [&](int64_t from, int64_t to) {
    for (const Slot* slot = first; slot != last; ++slot) {
      const int64_t begin = std::max(from, slot->begin), end = std::min(to, slot->end());
      if (begin < end) cpu::vectorized([&f, begin, end, slot] { f(begin, end, *slot); });
    }
  });
}

}  // namespace tessera
