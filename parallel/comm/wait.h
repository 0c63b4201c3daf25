// How one rank waits for another: spin briefly, then give the core away, then sleep in the kernel.
//
// A wait that only spins makes an all-reduce of four ranks on two cores a thousand times slower; one that only sleeps
// makes two ranks on two cores ten times slower. A flag is a word in memory that both ranks see (of one process, or of
// a window that processes share), raised to ever higher numbers by one rank and waited for by the others.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>

#include "tensor/error.h"

namespace tessera {

// Alone on its cache lines, so that raising it disturbs nobody else.
struct alignas(128) Flag {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};
};

// Raises the flag and wakes who sleeps on it. What was written before is visible to those who see the new value.
void raise(Flag& flag, uint32_t value);

// How long a wait has lasted for this process. The time for which the process was stopped (a suspended laptop, a frozen
// container) does not count, because the ranks it waits for were stopped too: a step between two readings counts as at
// most kMaxStep, so a wait reads it more often than that.
class AwakeTimer {
 public:
  static constexpr auto kMaxStep = std::chrono::milliseconds(250);
  // Seconds since it was made.
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
  bool crowded = false;                        // more threads than cores: spinning would keep the other rank waiting
  const std::atomic<int>* poisoned = nullptr;  // a rank that failed, or a negative number
  // Called while a wait goes on, because others may be waiting for what it does; true: again very soon.
  std::function<bool()> meanwhile = {};
};

// Who wants to know of a wait: that it is long (at times of a Reminder), and in the end how long it was. Not told of
// waits that end while this rank still spins.
class WaitObserver {
 public:
  virtual void overdue(double seconds, bool again) = 0;
  virtual void waited(double seconds) = 0;

 protected:
  ~WaitObserver() = default;
};

enum class Waited { arrived, timed_out, poisoned };

// Until the flag has `value` or one that is later (numbers wrap around), a rank fails, or the time is over.
Waited wait_for(Flag& flag, uint32_t value, const WaitOptions& patience, WaitObserver* observer = nullptr);

// How long communications hold up a rank's own thread: in those that return when they are done, and in wait() for those
// in the background. What a background thread waits while the rank computes is not in it.

// Adds up the time for which one rank is held up; it is used on that rank's own thread.
class StallTimer {
 public:
  double seconds() const { return std::chrono::duration<double>(total_).count(); }

 private:
  friend class ScopedStall;
  std::chrono::steady_clock::duration total_{};
};

// From here to the end of the scope; nothing without somewhere to add it.
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
