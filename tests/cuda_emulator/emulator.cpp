// Fibers and their barriers.
#include "tests/cuda_emulator/emulator.h"

#include <sys/mman.h>

#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "tests/cuda_emulator/sanitizers.h"

// Stacks are accessible to host and device (tests/cuda_emulator/reach.h).
void* map_really(void* at, size_t bytes, int access, int flags, int file, off_t offset) asm("__real_mmap");

// Saves callee-saved registers on the current stack, and resumes on the other one.
extern "C" void tessera_switch_stack(void** leave, void* enter);
asm(R"(
.text
.type tessera_switch_stack, @function
.globl tessera_switch_stack
tessera_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tessera_switch_stack, .-tessera_switch_stack
)");

namespace tessera::emulator {
namespace {

constexpr size_t kStack = 256 * 1024;
constexpr unsigned kMaxThreads = 1024, kLanes = 32;
constexpr uint64_t kMaxShared = 227 * 1024, kSharedBytes = kMaxShared + 1024;

enum class State : uint8_t { ready, at_block, at_warp, ended };

struct Fiber {
  std::byte* stack = nullptr;
  void* top = nullptr;         // saved stack pointer
  void* fake_stack = nullptr;  // AddressSanitizer's
  FiberId known = nullptr;
  State state = State::ended;
};

struct Warp {
  uint32_t arrived = 0;
  bool odd = false;              // parity: which of the first two points the next full barrier uses, as in a block
  std::array<char, 3> points{};  // the last is used by partial barriers
  std::array<uint64_t, kLanes> slots{};
  std::array<const void*, kLanes> operands{};
};

[[noreturn]] void fail(const char* why) {
  std::fprintf(stderr, "emulated GPU: %s\n", why);
  std::abort();
}

class Block {
 public:
  Block() : fibers_(kMaxThreads), warps_(kMaxThreads / kLanes) {
    shared_ = static_cast<std::byte*>(std::aligned_alloc(1024, kSharedBytes));
  }
  ~Block() {
    for (Fiber& f : fibers_)
      if (f.stack) {
        forget(f.known);
        munmap(f.stack, kStack);
      }
    allow(shared_, kSharedBytes);
    std::free(shared_);
  }

  void run(unsigned threads, const std::function<void(unsigned)>& enter, const std::function<void()>& body) {
    body_ = &body;
    scheduler_ = current_fiber();
    release_order(&begun_);
    threads_ = alive_ = threads;
    waiting_ = 0;
    backwards_ = !backwards_;
    for (unsigned t = 0; t < threads; ++t) prepare(fibers_[t]);
    for (Warp& w : warps_) w.arrived = 0;
    while (alive_ > 0) {
      moved_ = false;
      for (unsigned i = 0; i < threads; ++i) {
        const unsigned t = backwards_ ? threads - 1 - i : i;
        if (fibers_[t].state != State::ready) continue;
        current_ = t;
        enter(t);
        resume(fibers_[t]);
        moved_ = true;
      }
      if (!moved_) fail("threads wait for each other at different barriers");
    }
    acquire_order(&ended_);
  }

  // Provides `bytes` of shared memory filled with NaN in every dtype; AddressSanitizer poisons the memory after it.
  void allow_shared(uint64_t bytes) {
    allow(shared_, bytes);
    std::memset(shared_, 0xff, bytes);
    forbid(shared_ + bytes, kSharedBytes - bytes);
  }

  unsigned current() const { return current_; }
  std::byte* shared() const { return shared_; }

  void sync_block() {
    ++waiting_;
    Fiber& f = fibers_[current_];
    f.state = State::at_block;
    char* const point = &points_[odd_];  // a fast thread may reach the next barrier before others leave this one
    release_order(point);
    release_block();
    wait();
    acquire_order(point);
  }

  // `orders`: whether the barrier orders memory accesses, which a shuffle does not promise.
  void sync_warp(uint32_t mask, bool orders) {
    const unsigned lane = current_ % kLanes;
    if (!(mask >> lane & 1u)) fail("a lane waits at a warp barrier whose mask excludes it");
    Warp& w = warp();
    w.arrived |= 1u << lane;
    Fiber& f = fibers_[current_];
    f.state = State::at_warp;
    const bool all = (mask & present()) == present();
    char* const point = &w.points[!all ? 2 : w.odd];
    if (orders) release_order(point);
    if ((w.arrived & mask & present()) == (mask & present())) {
      w.arrived &= ~mask;
      if (all) w.odd = !w.odd;
      for (unsigned l = 0; l < kLanes; ++l)
        if (mask >> l & 1u && current_ - lane + l < threads_ && fibers_[current_ - lane + l].state == State::at_warp)
          fibers_[current_ - lane + l].state = State::ready;
    }
    wait();
    if (orders) acquire_order(point);
  }
  Warp& warp() { return warps_[current_ / kLanes]; }
  // Mask of the block's lanes in the running thread's warp.
  uint32_t present() const {
    const unsigned first = current_ / kLanes * kLanes, lanes = std::min(kLanes, threads_ - first);
    return lanes == kLanes ? ~0u : (1u << lanes) - 1;
  }

  void end() {
    Fiber& f = fibers_[current_];
    f.state = State::ended;
    --alive_;
    release_block();
    release_order(&ended_);
    leave_for(nullptr, bottom_, size_);
    switch_fiber(scheduler_);
    tessera_switch_stack(&f.top, top_);
    fail("a finished thread resumed");
  }
  void begin() {
    arrived(nullptr, &bottom_, &size_);
    acquire_order(&begun_);
    (*body_)();
  }

 private:
  void prepare(Fiber& f);

  void resume(Fiber& f) {
    leave_for(&fake_stack_, f.stack, kStack);
    switch_fiber(f.known);
    tessera_switch_stack(&top_, f.top);
    arrived(fake_stack_, nullptr, nullptr);
  }
  // Returns to the fiber scheduler until the running fiber is ready again.
  void wait() {
    Fiber& f = fibers_[current_];
    leave_for(&f.fake_stack, bottom_, size_);
    switch_fiber(scheduler_);
    tessera_switch_stack(&f.top, top_);
    arrived(f.fake_stack, &bottom_, &size_);
  }
  void release_block() {
    if (waiting_ == 0 || waiting_ < alive_) return;
    waiting_ = 0;
    odd_ = !odd_;
    for (unsigned t = 0; t < threads_; ++t)
      if (fibers_[t].state == State::at_block) fibers_[t].state = State::ready;
  }

  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::byte* shared_;
  const std::function<void()>* body_ = nullptr;
  unsigned threads_ = 0, alive_ = 0, waiting_ = 0, current_ = 0;
  bool backwards_ = true, moved_ = false;
  void *top_ = nullptr, *fake_stack_ = nullptr;  // stack of the scheduler: saved pointer, and AddressSanitizer's data
  const void* bottom_ = nullptr;
  size_t size_ = 0;
  FiberId scheduler_ = nullptr;  // the thread that runs the fibers
  bool odd_ = false;             // which point the next barrier uses
  std::array<char, 2> points_{};
  char begun_ = 0, ended_ = 0;
};

thread_local std::unique_ptr<Block> running;

void enter_fiber() {
  running->begin();
  running->end();
}

void Block::prepare(Fiber& f) {
  if (!f.stack) {
    void* const p =
        map_really(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fail("cannot allocate a thread's stack");
    f.stack = static_cast<std::byte*>(p);
    f.known = make_fiber_id();
  }
  // Six registers, then the return address; the stack is aligned as at a function entry.
  void** const top = reinterpret_cast<void**>(f.stack + kStack) - 8;
  for (int i = 0; i < 6; ++i) top[i] = nullptr;
  top[6] = reinterpret_cast<void*>(&enter_fiber);
  top[7] = nullptr;
  f.top = top;
  f.state = State::ready;
}

}  // namespace

bool can_run(uint64_t threads, uint64_t shared_bytes) {
  return threads > 0 && threads <= kMaxThreads && shared_bytes <= kMaxShared;
}

void run_block(unsigned threads, uint64_t shared_bytes, const std::function<void(unsigned)>& enter,
               const std::function<void()>& body) {
  if (!running) running = std::make_unique<Block>();
  running->allow_shared(shared_bytes);
  count_block(shared_bytes);
  running->run(threads, enter, body);
}

std::byte* dynamic_shared() { return running->shared(); }
void sync_block() { running->sync_block(); }
void sync_warp(uint32_t mask) { running->sync_warp(mask, true); }

// Calls f with the bits of all lanes and returns its result.
template <class F>
static auto of_all(uint32_t mask, uint64_t bits, const F& f) {
  Warp& w = running->warp();
  w.slots[running->current() % kLanes] = bits;
  running->sync_warp(mask, false);
  const auto found = f(w.slots);
  running->sync_warp(mask, false);
  return found;
}

uint64_t exchange_bits(uint32_t mask, uint64_t bits, int lane) {
  return of_all(mask, bits, [&](const auto& slots) { return slots[static_cast<size_t>(lane) % kLanes]; });
}

uint32_t ballot(uint32_t mask, bool predicate) {
  return of_all(mask, predicate ? 1 : 0, [&](const auto& slots) {
    uint32_t votes = 0;
    for (unsigned l = 0; l < kLanes; ++l)
      if (mask >> l & 1u && slots[l] != 0) votes |= 1u << l;
    return votes;
  });
}

void together(const void* mine, const std::function<void(const void* const* all)>& f) {
  Warp& w = running->warp();
  w.operands[running->current() % kLanes] = mine;
  sync_warp(~0u);
  if (running->current() % kLanes == 0) f(w.operands.data());
  sync_warp(~0u);
}

}  // namespace tessera::emulator
