// A table of pieces.
#include "tests/cuda_emulator/memory.h"

#include <iterator>

namespace tessera::emulator {

void KnownMemory::add(const void* p, size_t bytes) {
  const std::lock_guard lock(mutex_);
  ends_[static_cast<const std::byte*>(p)] = static_cast<const std::byte*>(p) + bytes;
}

size_t KnownMemory::remove(const void* p) {
  const std::lock_guard lock(mutex_);
  const auto piece = ends_.find(static_cast<const std::byte*>(p));
  if (piece == ends_.end()) return 0;
  const auto bytes = static_cast<size_t>(piece->second - piece->first);
  ends_.erase(piece);
  return bytes;
}

bool KnownMemory::has(const void* p, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto* const first = static_cast<const std::byte*>(p);
  return first + bytes <= end_of_piece(first);
}

bool KnownMemory::begins_in_one(const void* p) const {
  const std::lock_guard lock(mutex_);
  return end_of_piece(static_cast<const std::byte*>(p)) != nullptr;
}

const std::byte* KnownMemory::end_of_piece(const std::byte* p) const {
  const auto after = ends_.upper_bound(p);
  return after != ends_.begin() && p < std::prev(after)->second ? std::prev(after)->second : nullptr;
}

KnownMemory& known_memory() {
  static KnownMemory all;
  return all;
}

}  // namespace tessera::emulator
