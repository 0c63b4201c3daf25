// Waits on flags with Linux futexes, which work between threads and between processes.
#include "parallel/comm/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

#include "parallel/comm/trace.h"

namespace tessera {

namespace {

constexpr int kSpins = 2000, kSpinsIfOversubscribed = 20;
constexpr double kYielding_s = 100e-6;
constexpr long kSlice_ns = 20'000'000;  // a sleeper's polling interval for failures and timeouts
constexpr long kBusySlice_ns = 50'000;  // the interval while `progress` has work

bool reached(const std::atomic<uint32_t>& flag, uint32_t value, std::memory_order order) {
  return static_cast<int32_t>(flag.load(order) - value) >= 0;
}

void pause() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool has_failed(const WaitOptions& p) { return p.failed_rank && p.failed_rank->load(std::memory_order_acquire) >= 0; }

void sleep_on(Flag& flag, uint32_t value, long slice_ns) {
  flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t now = flag.value.load(std::memory_order_seq_cst);
  if (static_cast<int32_t>(now - value) < 0) {
    const timespec slice{0, slice_ns};
    syscall(SYS_futex, &flag.value, FUTEX_WAIT, now, &slice, nullptr, 0);
  }
  flag.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace

void raise(Flag& flag, uint32_t value) {
  flag.value.store(value, std::memory_order_seq_cst);
  if (flag.sleepers.load(std::memory_order_seq_cst) > 0)
    syscall(SYS_futex, &flag.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

WaitResult wait_for(Flag& flag, uint32_t value, const WaitOptions& wait_options, WaitObserver* observer) {
  const int spins = wait_options.oversubscribed ? kSpinsIfOversubscribed : kSpins;
  for (int i = 0; i < spins; ++i) {
    if (reached(flag.value, value, std::memory_order_acquire)) return WaitResult::arrived;
    pause();
  }
  AwakeTimer timer;
  ReportInterval reminder;
  while (!reached(flag.value, value, std::memory_order_acquire)) {
    if (has_failed(wait_options)) return WaitResult::peer_failed;
    const bool busy = wait_options.progress && wait_options.progress();
    const double waited = timer.seconds();
    if (waited >= wait_options.timeout_s) return WaitResult::timed_out;
    if (observer && reminder.is_due(waited)) observer->overdue(waited, reminder.again());
    if (waited < kYielding_s)
      sched_yield();
    else
      sleep_on(flag, value, busy ? kBusySlice_ns : kSlice_ns);
  }
  if (observer) observer->waited(timer.seconds());
  return WaitResult::arrived;
}

}  // namespace tessera
