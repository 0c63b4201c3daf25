// Times on the steady clock.
#include "parallel/comm/trace.h"

#include <chrono>

namespace tessera {
namespace {
double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
}  // namespace

Trace::Trace() : began_(seconds()) {}
double Trace::now() const { return seconds() - began_; }

void Trace::add(TraceEvent event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
}

std::vector<TraceEvent> Trace::events() const {
  const std::lock_guard lock(mutex_);
  return events_;
}

}  // namespace tessera
