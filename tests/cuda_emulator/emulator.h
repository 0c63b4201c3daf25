// A thread block on one CPU thread: each GPU thread is a fiber with its own stack, which runs until it ends or waits at
// a barrier.
//
// Every second block runs its threads in reverse, so that a kernel with a missing barrier computes wrong results;
// blocks run forwards, backwards, or the odd before the even ones, which exposes dependencies between blocks. A
// deadlocked block ends the program with an error message.
#pragma once
#include <cstdint>
#include <cstring>
#include <functional>

namespace tessera::emulator {

// Whether a block is within a GPU's limits: 1,024 threads, 227 KiB of shared memory.
bool can_run(uint64_t threads, uint64_t shared_bytes);
// Runs `body` once per thread. `enter(t)` is called whenever thread t starts or resumes.
void run_block(unsigned threads, uint64_t shared_bytes, const std::function<void(unsigned)>& enter,
               const std::function<void()>& body);
// f(0) ... f(count - 1), in an order that varies between calls.
void in_any_order(uint64_t count, const std::function<void(uint64_t)>& f);
// Number of blocks that this thread has run with `bytes` bytes of shared memory; identifies the launched kernels.
uint64_t blocks_with_shared(uint64_t bytes);
void count_block(uint64_t shared_bytes);
std::byte* dynamic_shared();  // memory of the running block, aligned to 1,024 bytes

void sync_block();              // waits for all threads that have not ended
void sync_warp(uint32_t mask);  // lanes of the running thread's warp
// These wait for the lanes too, but do not order memory accesses.
uint64_t exchange_bits(uint32_t mask, uint64_t bits, int lane);
uint32_t ballot(uint32_t mask, bool predicate);
// Each of the 32 lanes passes the address `mine`; one lane calls f(all) once with the addresses of all 32.
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
