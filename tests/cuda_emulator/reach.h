// Memory protection between host and device: the host may not access device memory, nor a kernel host memory.
//
// Both share one address space here, so accesses that would crash on a real GPU would go unnoticed. If the CPU has
// protection keys (man 7 pkeys), emulated device memory has one key and the program's own mappings (arenas, files)
// another, and a thread has the access rights of its current activity. A forbidden access ends the program with a line
// that names it. Heap and stacks are accessible to both; without protection keys all memory is.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tessera::emulator {

enum class Side : uint8_t { host, kernel, copy };  // a copy may access both

// Sets the calling thread's access rights for the scope.
class Acting {
 public:
  explicit Acting(Side as);
  ~Acting();
  Acting(const Acting&) = delete;
  Acting& operator=(const Acting&) = delete;

 private:
  unsigned gpu_, host_;  // previous rights
};

// Whether accesses are checked on this CPU.
bool is_guarded();
// Assigns the pages [p, p + bytes) to the GPU, to the host, or (pinned) to both.
void assign_to_gpu(void* p, size_t bytes);
void assign_to_host(void* p, size_t bytes);
void assign_to_both(void* p, size_t bytes);

}  // namespace tessera::emulator
