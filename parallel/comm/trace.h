// Two records of a rank's activity: the trace, for timelines, and the flight recorder, for failures.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "parallel/comm/call.h"
#include "tensor/arena.h"

namespace tessera {

// Communications and the stalls they cause, pipeline actions, and phases; with a watched arena, also its memory after
// each event and after each change of at least 1/32 of its peak.

enum class TraceKind : uint8_t { communication, action, phase, wait };

struct TraceEvent {
  std::string what;  // "all_reduce", "2F0", "optimizer"
  std::string axis;
  int64_t bytes = 0;     // of the communicated array
  double requested = 0;  // seconds since the trace began
  double begin = 0, end = 0;
  int64_t sent = 0;
  TraceKind kind = TraceKind::communication;
  double cpu_s = 0;  // CPU seconds of an action's thread
};

struct TraceStep {
  int64_t step = 0;  // counted from 1
  double begin = 0, end = 0;
};
struct TraceMemory {
  double time = 0;
  std::array<int64_t, kCategories> live = {};
};

class Trace : NotCopied {
 public:
  // With `max_steps` > 0, records only events within steps and retains only the last `max_steps` steps.
  explicit Trace(size_t max_steps = 0);
  ~Trace();
  double now() const;
  static double cpu_now();
  double origin() const { return began_; }  // start on the steady clock, which the processes of a host share
  void add(TraceEvent event);
  void begin_step(int64_t step);
  void end_step();
  void watch(ArenaPtr arena);  // null: none

  std::vector<TraceEvent> events() const { return copied(events_); }  // ordered by end, excluding waits
  std::vector<TraceEvent> waits() const { return copied(waits_); }
  std::vector<TraceStep> steps() const { return copied(steps_); }
  std::vector<TraceMemory> memory() const { return copied(memory_); }

 private:
  template <class T>
  std::vector<T> copied(const std::deque<T>& all) const {
    const std::lock_guard lock(mutex_);
    return {all.begin(), all.end()};
  }
  void sample();
  void changed(const std::array<int64_t, kCategories>& live);
  void forget();
  const double began_;
  const size_t max_steps_;
  ArenaPtr arena_;
  std::array<int64_t, kCategories> live_ = {};
  int64_t sampled_ = 0, peak_ = 0;  // total bytes: at the last sample, and peak
  mutable std::mutex mutex_;
  bool recording_;
  std::deque<TraceEvent> events_, waits_;
  std::deque<TraceStep> steps_;
  std::deque<TraceMemory> memory_;
};

// Records a phase or a wait until the end of the scope; no-op for null.
class TraceSpan : NotCopied {
 public:
  TraceSpan(Trace* trace, const char* what, TraceKind kind = TraceKind::phase)
      : trace_(trace), what_(what), kind_(kind), begin_(trace ? trace->now() : 0) {}
  ~TraceSpan();

 private:
  Trace* trace_;
  const char* what_;
  TraceKind kind_;
  double begin_;
};

inline constexpr const char* kStall = "held up";
// Wraps `done` so that the trace records how long its waiter was stalled.
std::future<void> trace_stall(std::future<void> done, Trace* trace);

// The flight recorder stores a rank's recent communications and the time it has waited for each other rank, and reports
// long waits. After a failure `flight.json` shows the progress of every rank, one line per rank:
//
//   {"rank": 3, "ranks": 4, "cause": "[dp axis] ...", "operations": [{"axis": "dp", "number": 17, "operation":
//    "all_reduce", "bytes": 4096, "begun": 1.2031, "ended": 1.2034}, ...]}
//
// `number` counts a rank's operations on an axis, so matching operations of different ranks have the same number;
// `ended` is null if the rank was still in the operation. Times are seconds since the rank began. Recording costs two
// reads of the CPU's time-stamp counter and a few stores.

class StallReporter {
 public:
  explicit StallReporter(std::function<void(const std::string& line)> say) : say_(std::move(say)) {}
  // True for the first wait on that axis for that rank.
  bool is_news(const std::string& axis, int missing);
  void say(const std::string& line) const { say_(line); }

 private:
  std::function<void(const std::string&)> say_;
  std::mutex mutex_;
  std::set<std::pair<std::string, int>> reported_;
};

class Flight {
 public:
  Flight(int rank, int ranks, std::shared_ptr<StallReporter> waits);

  int axis(const std::string& name);
  // Returns a ticket for end(). Thread-safe.
  uint64_t begin(int axis, Op op, int64_t bytes) {
    const uint64_t ticket = made_.fetch_add(1, std::memory_order_relaxed);
    Entry& e = entries_[ticket % kEntries];
    e.ended.store(0, std::memory_order_relaxed);
    e.kind.store(static_cast<uint64_t>(axis) << 8 | static_cast<uint64_t>(op), std::memory_order_relaxed);
    std::atomic<uint64_t>& number = numbers_[static_cast<size_t>(axis)];  // one operation of an axis at a time
    number.store(number.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    e.number.store(number.load(std::memory_order_relaxed), std::memory_order_relaxed);
    e.bytes.store(bytes, std::memory_order_relaxed);
    e.begun.store(ticks(), std::memory_order_relaxed);
    return ticket;
  }
  void end(uint64_t ticket) { entries_[ticket % kEntries].ended.store(ticks(), std::memory_order_relaxed); }

  void waited(int world_rank, double seconds);
  std::vector<double> waits() const;
  double seconds() const;  // since construction

  // Reports a wait that has lasted `seconds`, or, if `again`, that it continues. `last` is the missing rank's last
  // operation.
  void overdue(const std::string& axis, const std::string& during, int missing, const std::string& last, double seconds,
               bool again);

  std::string to_json(const std::string& cause) const;

 private:
  static constexpr size_t kEntries = 32, kAxes = 16;
  static uint64_t ticks() {
#ifdef __x86_64__
    return __builtin_ia32_rdtsc();  // three times as fast as the clock
#else
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
  }
  double seconds_at(uint64_t tick) const;
  struct Entry {
    std::atomic<uint64_t> kind = 0, number = 0, begun = 0, ended = 0;
    std::atomic<int64_t> bytes = 0;
  };

  const int rank_;
  const std::shared_ptr<StallReporter> stall_reporter_;
  const uint64_t first_tick_;
  const std::chrono::steady_clock::time_point start_;
  std::atomic<uint64_t> made_ = 0;
  std::array<Entry, kEntries> entries_;
  std::array<std::atomic<uint64_t>, kAxes> numbers_{};
  mutable std::mutex naming_;
  std::vector<std::string> axes_;
  std::vector<std::atomic<int64_t>> waited_ns_;
};

// Intervals between reports of one wait: after 5 s, 30 s, 60 s, then doubling.
class ReportInterval {
 public:
  bool is_due(double waited) {
    if (waited < next_) return false;
    next_ = next_ == kFirst ? kSecond : 2 * next_;
    ++reported_;
    return true;
  }
  bool again() const { return reported_ > 1; }

 private:
  static constexpr double kFirst = 5, kSecond = 30;
  double next_ = kFirst;
  int reported_ = 0;
};

}  // namespace tessera
