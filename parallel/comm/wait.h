// Waiting for another rank: spin briefly, then yield the core, then sleep in the kernel. Spinning alone makes an
// all-reduce of four ranks on two cores a thousand times slower; sleeping alone makes two ranks on two cores ten times
// slower. A flag is a counter in memory shared by both ranks, raised by one rank and awaited by the others.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

#include "base/error.h"

namespace tessera {

// Has its own cache lines, to avoid false sharing.
struct alignas(128) Flag {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};
};

// Wakes sleeping waiters. Release/acquire: earlier writes are visible to ranks that observe the new value.
void raise(Flag& flag, uint32_t value);

// Excludes time during which the process was stopped (a suspended laptop, a frozen container), because the other ranks
// were stopped too. An interval between two readings counts as at most kMaxStep, so a wait must read the timer more
// often.
class AwakeTimer {
 public:
  static constexpr auto kMaxStep = std::chrono::milliseconds(250);
  double seconds() {
    const auto now = std::chrono::steady_clock::now();
    awake_ += std::min<std::chrono::steady_clock::duration>(now - std::exchange(last_, now), kMaxStep);
    return std::chrono::duration<double>(awake_).count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::duration awake_{};
};

struct WaitOptions {
  double timeout_s = 300;
  bool oversubscribed = false;                    // more threads than cores: spinning would delay the awaited rank
  const std::atomic<int>* failed_rank = nullptr;  // negative: none
  // Called during a wait, for work that other ranks may be waiting for; true: call again soon.
  std::function<bool()> progress = {};
};

// Not called for waits that end while spinning.
class WaitObserver {
 public:
  virtual void overdue(double seconds, bool again) = 0;
  virtual void waited(double seconds) = 0;

 protected:
  ~WaitObserver() = default;
};

enum class WaitResult { arrived, timed_out, peer_failed };

// The comparison with `value` wraps around.
WaitResult wait_for(Flag& flag, uint32_t value, const WaitOptions& wait_options, WaitObserver* observer = nullptr);

// The time during which communication stalls a rank's own thread: blocking calls, and wait() of background ones.
class StallTimer {
 public:
  double seconds() const { return std::chrono::duration<double>(total_).count(); }

 private:
  friend class ScopedStall;
  std::chrono::steady_clock::duration total_{};
};

// No-op for null.
class ScopedStall : NotCopied {
 public:
  explicit ScopedStall(StallTimer* to) : to_(to) {
    if (to_) begin_ = std::chrono::steady_clock::now();
  }
  ~ScopedStall() {
    if (to_) to_->total_ += std::chrono::steady_clock::now() - begin_;
  }

 private:
  StallTimer* to_;
  std::chrono::steady_clock::time_point begin_{};
};

}  // namespace tessera
