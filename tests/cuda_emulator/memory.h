// Registry of device and pinned allocations. A graph may copy no other memory, and no copy may span two allocations.
#pragma once
#include <cstddef>
#include <iterator>
#include <map>
#include <mutex>

namespace tessera::emulator {

class MemoryRegistry {
 public:
  void add(const void* p, size_t bytes) {
    const std::lock_guard lock(mutex_);
    ends_[static_cast<const std::byte*>(p)] = static_cast<const std::byte*>(p) + bytes;
  }
  // Returns the bytes of the allocation; 0 if there is none.
  size_t remove(const void* p) {
    const std::lock_guard lock(mutex_);
    const auto range = ends_.find(static_cast<const std::byte*>(p));
    if (range == ends_.end()) return 0;
    const auto bytes = static_cast<size_t>(range->second - range->first);
    ends_.erase(range);
    return bytes;
  }
  bool has(const void* p, size_t bytes) const {
    const std::lock_guard lock(mutex_);
    const auto* const first = static_cast<const std::byte*>(p);
    return first + bytes <= end_of_range(first);
  }
  bool begins_in_one(const void* p) const {
    const std::lock_guard lock(mutex_);
    return end_of_range(static_cast<const std::byte*>(p)) != nullptr;
  }

 private:
  const std::byte* end_of_range(const std::byte* p) const {
    const auto after = ends_.upper_bound(p);
    return after != ends_.begin() && p < std::prev(after)->second ? std::prev(after)->second : nullptr;
  }

  mutable std::mutex mutex_;
  std::map<const std::byte*, const std::byte*> ends_;  // by start address
};

inline MemoryRegistry& registered_memory() {
  static MemoryRegistry all;
  return all;
}

}  // namespace tessera::emulator
