// A log of what one rank did and when: communications, how long they held up its own thread, the actions of a pipeline,
// and whatever else wants to be seen beside them; where an arena is watched, with what it held after each, and whenever
// that had changed by a thirty-second of the most that it held.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <mutex>
#include <string>
#include <vector>

#include "tensor/arena.h"

namespace tessera {

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
class Trace {
 public:
  // With `keep` above 0, only what happens within steps is noted, and only the last `keep` steps are kept.
  explicit Trace(size_t keep = 0);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;
  double now() const;                       // seconds since the trace began
  static double processor_now();            // seconds that this thread has had a processor
  double origin() const { return began_; }  // when it began, on the steady clock, which the processes of a host share
  void add(TraceEvent event);
  void begin_step(int64_t step);
  void end_step();
  void watch(ArenaPtr arena);  // that which is watched now no more; null: none

  std::vector<TraceEvent> events() const;  // in the order of their end; waits apart
  std::vector<TraceEvent> waits() const;
  std::vector<TraceStep> steps() const;
  std::vector<TraceMemory> memory() const;

 private:
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
class TraceSpan {
 public:
  TraceSpan(Trace* trace, const char* what, TraceKind kind = TraceKind::phase)
      : trace_(trace), what_(what), kind_(kind), begin_(trace ? trace->now() : 0) {}
  ~TraceSpan();
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

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

}  // namespace tessera
