// A log of what one rank did and when: communications, and whatever else wants to be seen beside them.
#pragma once
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace tessera {

struct TraceEvent {
  std::string what;           // "all_reduce", "backward"
  std::string axis;           // of a communication
  int64_t bytes = 0;          // of its array
  double requested = 0;       // seconds since the trace began: when it was asked for,
  double begin = 0, end = 0;  // and when it ran
};

// May be written from any thread.
class Trace {
 public:
  Trace();
  double now() const;  // seconds since the trace began
  void add(TraceEvent event);
  std::vector<TraceEvent> events() const;  // in the order of their end

 private:
  double began_;
  mutable std::mutex mutex_;
  std::vector<TraceEvent> events_;
};

}  // namespace tessera
