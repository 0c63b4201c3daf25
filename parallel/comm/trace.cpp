// Times on the steady clock.
#include "parallel/comm/trace.h"

#include <chrono>
#include <ctime>
#include <utility>

namespace tessera {
namespace {
double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
}  // namespace

Trace::Trace(size_t keep) : began_(seconds()), keep_(keep), noting_(keep == 0) {}
double Trace::now() const { return seconds() - began_; }

double Trace::processor_now() {
  std::timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void Trace::add(TraceEvent event) {
  const std::lock_guard lock(mutex_);
  if (!noting_) return;
  events_.push_back(std::move(event));
  sample();
}

void Trace::watch(ArenaPtr arena) {
  const std::lock_guard lock(mutex_);
  arena_ = std::move(arena);
}

void Trace::begin_step(int64_t step) {
  const std::lock_guard lock(mutex_);
  const double time = now();
  steps_.push_back({step, time, time});
  forget();
  noting_ = true;
  sample();
}

void Trace::end_step() {
  const std::lock_guard lock(mutex_);
  sample();
  steps_.back().end = now();
  noting_ = keep_ == 0;
}

void Trace::sample() {
  if (!arena_) return;
  TraceMemory at{.time = now()};
  for (size_t c = 0; c < at.live.size(); ++c) at.live[c] = arena_->usage(static_cast<Category>(c)).live;
  memory_.push_back(at);
}

void Trace::forget() {
  if (keep_ == 0 || steps_.size() <= keep_) return;
  while (steps_.size() > keep_) steps_.pop_front();
  const double oldest = steps_.front().begin;
  std::erase_if(events_, [&](const TraceEvent& e) { return e.begin < oldest; });
  std::erase_if(memory_, [&](const TraceMemory& m) { return m.time < oldest; });
}

std::vector<TraceEvent> Trace::events() const {
  const std::lock_guard lock(mutex_);
  return {events_.begin(), events_.end()};
}

std::vector<TraceStep> Trace::steps() const {
  const std::lock_guard lock(mutex_);
  return {steps_.begin(), steps_.end()};
}

std::vector<TraceMemory> Trace::memory() const {
  const std::lock_guard lock(mutex_);
  return {memory_.begin(), memory_.end()};
}

TraceSpan::~TraceSpan() {
  if (!trace_) return;
  const double end = trace_->now();
  trace_->add({.what = what_, .axis = {}, .begin = begin_, .end = end, .kind = TraceKind::phase});
}

}  // namespace tessera
