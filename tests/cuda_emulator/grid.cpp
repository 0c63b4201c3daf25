// Execution order and number of a kernel's blocks.
#include <map>

#include "tests/cuda_emulator/emulator.h"

namespace tessera::emulator {
namespace {

thread_local std::map<uint64_t, uint64_t> blocks_run;  // by bytes of shared memory

}  // namespace

void in_any_order(uint64_t count, const std::function<void(uint64_t)>& f) {
  static thread_local unsigned calls = 0;
  const unsigned order = calls++ % 3;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t odd = 2 * i + 1, even = 2 * (i - count / 2);  // odd blocks come first
    f(order == 0 ? i : order == 1 ? count - 1 - i : odd < count ? odd : even);
  }
}

void count_block(uint64_t shared_bytes) { ++blocks_run[shared_bytes]; }

uint64_t blocks_with_shared(uint64_t bytes) { return blocks_run[bytes]; }

}  // namespace tessera::emulator
