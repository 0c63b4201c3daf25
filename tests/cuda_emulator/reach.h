// Who may touch which memory: the host not the GPU's, a kernel not the host's.
//
// Both lie in one address space here, so what would end a program on a GPU's machine would go unnoticed. Where the
// processor has protection keys (man 7 pkeys), the emulated GPU's memory has one and what the program maps for itself
// (arenas, files) another, and a thread has the rights of what it is doing. A touch without the right ends the program
// with a line that says which. What lies on the heap or on a stack can be touched by both; without keys all can.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tessera::emulator {

enum class Side : uint8_t { host, kernel, copy };  // a copy reaches both

// The side that the calling thread acts for until the end of the scope.
class Acting {
 public:
  explicit Acting(Side as);
  ~Acting();
  Acting(const Acting&) = delete;
  Acting& operator=(const Acting&) = delete;

 private:
  unsigned gpu_, host_;  // the rights before
};

// Whether this processor keeps watch.
bool is_guarded();
// [p, p + bytes), whole pages, is from now on the GPU's, the host's, or (pinned) of both.
void give_to_gpu(void* p, size_t bytes);
void give_to_host(void* p, size_t bytes);
void give_to_both(void* p, size_t bytes);

}  // namespace tessera::emulator
