// Memory that is there until it is given back: GPUs' and pinned, each piece for itself. A graph may copy no other, and
// no copy may reach from one piece into the next.
#pragma once
#include <cstddef>
#include <map>
#include <mutex>

namespace tessera::emulator {

class KnownMemory {
 public:
  void add(const void* p, size_t bytes);
  size_t remove(const void* p);  // the bytes of the piece; 0: there is none
  bool has(const void* p, size_t bytes) const;
  bool begins_in_one(const void* p) const;

 private:
  const std::byte* end_of_piece(const std::byte* p) const;

  mutable std::mutex mutex_;
  std::map<const std::byte*, const std::byte*> ends_;  // by the beginning
};
KnownMemory& known_memory();

}  // namespace tessera::emulator
