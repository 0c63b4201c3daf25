// Two records of what a rank does and when: the trace, for timelines, and the flight, for a failure that may come.
#pragma once
#include <chrono>
#include <deque>
#include <future>
#include <set>

#include "parallel/comm/call.h"
#include "tensor/arena.h"

namespace tessera {

// The trace: communications, how long they held up the rank's own thread, the actions of a pipeline, and whatever else
// wants to be seen beside them; where an arena is watched, with what it held after each, and whenever that had changed
// by a thirty-second of the most that it held.

enum class TraceKind : uint8_t { communication, action, phase, wait };

struct TraceEvent {
  std::string what;           // "all_reduce", "2F0", "optimizer"
  std::string axis;           // axis of a communication or an action
  int64_t bytes = 0;          // bytes of its array
  double requested = 0;       // seconds since the trace began: when it was asked for,
  double begin = 0, end = 0;  // and when it ran
  int64_t sent = 0;           // bytes that left this rank
  TraceKind kind = TraceKind::communication;
  double processor = 0;  // seconds that an action's thread had a processor meanwhile
};

// A step of training, and bytes of the watched arena at a moment.
struct TraceStep {
  int64_t step = 0;  // counted from 1
  double begin = 0, end = 0;
};
struct TraceMemory {
  double time = 0;
  std::array<int64_t, kCategories> live = {};
};

// May be written from any thread.
class Trace : NotCopied {
 public:
  // With `keep` above 0, only what happens within steps is noted, and only the last `keep` steps are kept.
  explicit Trace(size_t keep = 0);
  ~Trace();
  double now() const;                       // seconds since the trace began
  static double processor_now();            // seconds that this thread has had a processor
  double origin() const { return began_; }  // when it began, on the steady clock, which the processes of a host share
  void add(TraceEvent event);
  void begin_step(int64_t step);
  void end_step();
  void watch(ArenaPtr arena);  // that which is watched now no more; null: none

  std::vector<TraceEvent> events() const { return copied(events_); }  // in the order of their end; waits apart
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
  const size_t keep_;
  ArenaPtr arena_;
  std::array<int64_t, kCategories> live_ = {};
  int64_t noted_ = 0, most_ = 0;  // bytes of all categories: at the last sample, and ever
  mutable std::mutex mutex_;
  bool noting_;
  std::deque<TraceEvent> events_, waits_;
  std::deque<TraceStep> steps_;
  std::deque<TraceMemory> memory_;
};

// A phase, or a wait, from here to the end of the scope; nothing without a trace.
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

// A rank's thread that waits for a communication.
inline constexpr const char* kHeldUp = "held up";
// `done`, such that the trace knows how long whoever waits for it was held up.
std::future<void> held_up_until(std::future<void> done, Trace* trace);

// The flight recorder notes what one rank does with others, as it does it: its last operations, how long it has waited
// and for whom, and a word when a wait is long. The notes are kept for the failure that may come: then the file
// `flight.json` shows what every rank had come to.
//
//   {"rank": 3, "ranks": 4, "cause": "[dp axis] ...", "operations": [{"axis": "dp", "number": 17, "operation":
//    "all_reduce", "bytes": 4096, "begun": 1.2031, "ended": 1.2034}, ...]}                 one line for each rank
//
// `number` counts a rank's operations on an axis, so that those that belong together have the same; `ended` is null
// where the rank was still in it. Times are seconds since the rank began. Noting an operation costs two readings of the
// processor's clock and a few stores.

// Says what the ranks of a process wait for, when they wait long; it says the same thing once.
class StallReporter {
 public:
  explicit StallReporter(std::function<void(const std::string& line)> say) : say_(std::move(say)) {}
  // True for the first to wait on that axis for that rank.
  bool is_news(const std::string& axis, int missing);
  void say(const std::string& line) const { say_(line); }

 private:
  std::function<void(const std::string&)> say_;
  std::mutex mutex_;
  std::set<std::pair<std::string, int>> said_;
};

class Flight {
 public:
  Flight(int rank, int ranks, std::shared_ptr<StallReporter> waits);

  // Number of an axis here; ranks give it the same name.
  int axis(const std::string& name);
  // An operation begins; its ticket is what end() takes. From any thread.
  uint64_t begin(int axis, Op op, int64_t bytes) {
    const uint64_t ticket = made_.fetch_add(1, std::memory_order_relaxed);
    Entry& e = entries_[ticket % kKept];
    e.ended.store(0, std::memory_order_relaxed);
    e.kind.store(static_cast<uint64_t>(axis) << 8 | static_cast<uint64_t>(op), std::memory_order_relaxed);
    std::atomic<uint64_t>& number = numbers_[static_cast<size_t>(axis)];  // one operation of an axis at a time
    number.store(number.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    e.number.store(number.load(std::memory_order_relaxed), std::memory_order_relaxed);
    e.bytes.store(bytes, std::memory_order_relaxed);
    e.begun.store(ticks(), std::memory_order_relaxed);
    return ticket;
  }
  void end(uint64_t ticket) { entries_[ticket % kKept].ended.store(ticks(), std::memory_order_relaxed); }

  // This rank has waited for a rank of the world.
  void waited(int world_rank, double seconds);
  std::vector<double> waits() const;  // seconds, by rank of the world
  double seconds() const;             // since it began

  // It has waited `seconds` up to now: says so where that is news, or goes on. `last` is what the missing rank did
  // last. `again`: this wait was said before.
  void overdue(const std::string& axis, const std::string& during, int missing, const std::string& last, double seconds,
               bool again);

  // One line of the file.
  std::string to_json(const std::string& cause) const;

 private:
  static constexpr size_t kKept = 32, kAxes = 16;
  static uint64_t ticks() {
#ifdef __x86_64__
    return __builtin_ia32_rdtsc();  // a third of the time that the clock takes
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
  const std::shared_ptr<StallReporter> long_waits_;
  const uint64_t first_tick_;
  const std::chrono::steady_clock::time_point start_;
  std::atomic<uint64_t> made_ = 0;
  std::array<Entry, kKept> entries_;
  std::array<std::atomic<uint64_t>, kAxes> numbers_{};
  mutable std::mutex naming_;
  std::vector<std::string> axes_;
  std::vector<std::atomic<int64_t>> waited_ns_;  // by rank of the world
};

// How long until the next word about a wait: 5 s, 30 s, 60 s, and then twice as long each time.
class ReportInterval {
 public:
  bool is_due(double waited) {
    if (waited < next_) return false;
    next_ = next_ == kFirst ? kSecond : 2 * next_;
    ++said_;
    return true;
  }
  bool again() const { return said_ > 1; }

 private:
  static constexpr double kFirst = 5, kSecond = 30;
  double next_ = kFirst;
  int said_ = 0;
};

}  // namespace tessera
