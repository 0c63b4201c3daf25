// Somebody who is told whenever an arena holds more or less.
#pragma once
#include <array>
#include <cstdint>
#include <functional>

#include "tensor/arena.h"

namespace tessera {

// Called at once, and behind every allocate() and release() from now on (null: no more), with the live bytes of each
// category: on the thread that changes them, one at a time. It must not use the arena. An arena has one.
using ArenaWatcher = std::function<void(const std::array<int64_t, kCategories>& live)>;
void watch(Arena& arena, ArenaWatcher watcher);

}  // namespace tessera
