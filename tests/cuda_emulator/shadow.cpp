// AddressSanitizer is notified when the host allocates or releases an arena's blocks, but a GPU accesses them later: a
// released block may be accessed until kernels queued before its release are done.
//
// Therefore poisoning of device or pinned memory is deferred until all work queued on any stream is done; unpoisoning
// takes effect immediately and cancels deferred poisoning.
#include "tests/cuda_emulator/streams.h"

#ifdef __SANITIZE_ADDRESS__
#include <algorithm>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include "tests/cuda_emulator/memory.h"

void forbid(const volatile void* p, size_t bytes) asm("__wrap___asan_poison_memory_region");
void permit(const volatile void* p, size_t bytes) asm("__wrap___asan_unpoison_memory_region");
void forbid_now(const volatile void* p, size_t bytes) asm("__real___asan_poison_memory_region");
void permit_now(const volatile void* p, size_t bytes) asm("__real___asan_unpoison_memory_region");

namespace tessera::emulator {
namespace {

struct Range {
  const std::byte *begin, *end;
};
struct Waiting {
  std::vector<Range> ranges;
  std::vector<Point> dependencies;
};

class Shadow {
 public:
  void forbid(Range r) {
    const std::lock_guard lock(mutex_);
    catch_up();
    waiting_.push_back({{r}, ends_of_lines()});
    catch_up();
  }
  void permit(Range r) {
    const std::lock_guard lock(mutex_);
    catch_up();
    for (Waiting& w : waiting_) {
      std::vector<Range> left;
      for (const Range& each : w.ranges) {
        if (each.begin < r.begin) left.push_back({each.begin, std::min(each.end, r.begin)});
        if (each.end > r.end) left.push_back({std::max(each.begin, r.end), each.end});
      }
      w.ranges = std::move(left);
    }
    permit_now(r.begin, static_cast<size_t>(r.end - r.begin));
  }
  void after_task() {
    const std::lock_guard lock(mutex_);
    catch_up();
  }

 private:
  void catch_up() {
    std::erase_if(waiting_, [](const Waiting& w) {
      if (!std::all_of(w.dependencies.begin(), w.dependencies.end(), std::mem_fn(&Point::is_reached))) return false;
      for (const Range& r : w.ranges) forbid_now(r.begin, static_cast<size_t>(r.end - r.begin));
      return true;
    });
  }

  std::mutex mutex_;
  std::vector<Waiting> waiting_;
};
Shadow& shadow() {
  static Shadow one;
  return one;
}

Range range(const volatile void* p, size_t bytes) {
  const auto* const begin = static_cast<const std::byte*>(const_cast<const void*>(p));
  return {begin, begin + bytes};
}

}  // namespace

void after_task() { shadow().after_task(); }

}  // namespace tessera::emulator

using namespace tessera::emulator;

void forbid(const volatile void* p, size_t bytes) {
  if (registered_memory().begins_in_one(const_cast<const void*>(p))) return shadow().forbid(range(p, bytes));
  forbid_now(p, bytes);
}
void permit(const volatile void* p, size_t bytes) {
  if (registered_memory().begins_in_one(const_cast<const void*>(p))) return shadow().permit(range(p, bytes));
  permit_now(p, bytes);
}
#else
void tessera::emulator::after_task() {}
#endif
