// One block of threads on one thread of the CPU: each is a fiber with a stack of its own, which runs until it ends or
// waits for others at a barrier.
//
// Every second block runs its threads in reverse, so that a kernel without a barrier that it needs gives wrong numbers,
// and a kernel's blocks run forwards, backwards, or the odd before the even ones, so that one whose blocks need each
// other does.
// A block in which all wait and nothing can go on ends the program with a line that says so.
#pragma once
#include <cstdint>
#include <cstring>
#include <functional>

namespace tessera::emulator {

// Whether a block of that size is within a GPU's limits: 1,024 threads, 227 KiB of shared memory.
bool can_run(uint64_t threads, uint64_t shared_bytes);
// Runs `body` once per thread. `enter(t)` is called whenever thread t starts or goes on.
void run_block(unsigned threads, uint64_t shared_bytes, const std::function<void(unsigned)>& enter,
               const std::function<void()>& body);
// f(0) ... f(count - 1), in an order that changes from call to call.
void in_any_order(uint64_t count, const std::function<void(uint64_t)>& f);
// Blocks that this thread has run with so many bytes of shared memory: which kernels were launched shows in it.
uint64_t blocks_with_shared(uint64_t bytes);
void count_block(uint64_t shared_bytes);
std::byte* dynamic_shared();  // memory of the running block, aligned to 1,024 bytes

void sync_block();              // all threads that have not ended
void sync_warp(uint32_t mask);  // lanes of the running thread's warp
// These wait for the lanes too, but order no memory.
uint64_t exchange_bits(uint32_t mask, uint64_t bits, int lane);
uint32_t ballot(uint32_t mask, bool predicate);
// The 32 lanes each give `bytes` at `mine`; f(all) is called once, by one lane, with the addresses of all 32.
void together(const void* mine, const std::function<void(const void* const* all)>& f);

template <class T>
T exchange(uint32_t mask, T value, int lane) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange_bits(mask, bits, lane);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace tessera::emulator
