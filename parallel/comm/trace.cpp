// Times on the steady clock.
#include "parallel/comm/trace.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <numeric>
#include <utility>

#include "tensor/arena.h"

namespace tessera {
namespace {
constexpr int64_t kShare = 32;  // changes below 1 / kShare of the most bytes ever are noted with the next event
double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
int64_t sum(const std::array<int64_t, kCategories>& x) { return std::accumulate(x.begin(), x.end(), int64_t{0}); }
}  // namespace

Trace::Trace(size_t keep) : began_(seconds()), keep_(keep), noting_(keep == 0) {}
Trace::~Trace() { watch(nullptr); }
double Trace::now() const { return seconds() - began_; }

double Trace::processor_now() {
  std::timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void Trace::add(TraceEvent event) {
  const std::lock_guard lock(mutex_);
  if (!noting_) return;
  (event.kind == TraceKind::wait ? waits_ : events_).push_back(std::move(event));
  sample();
}

// The arena calls with its own lock held, so it is called without ours.
void Trace::watch(ArenaPtr arena) {
  if (arena_) tessera::watch(*arena_, nullptr);
  arena_ = std::move(arena);
  if (arena_) tessera::watch(*arena_, [this](const auto& live) { changed(live); });
}

void Trace::changed(const std::array<int64_t, kCategories>& live) {
  const std::lock_guard lock(mutex_);
  live_ = live;
  const int64_t held = sum(live);
  most_ = std::max(most_, held);
  if (noting_ && std::abs(held - noted_) * kShare >= most_) sample();
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
  memory_.push_back({.time = now(), .live = live_});
  noted_ = sum(live_);
}

void Trace::forget() {
  if (keep_ == 0 || steps_.size() <= keep_) return;
  while (steps_.size() > keep_) steps_.pop_front();
  const double oldest = steps_.front().begin;
  for (std::deque<TraceEvent>* list : {&events_, &waits_})
    std::erase_if(*list, [&](const TraceEvent& e) { return e.begin < oldest; });
  std::erase_if(memory_, [&](const TraceMemory& m) { return m.time < oldest; });
}

std::vector<TraceEvent> Trace::events() const {
  const std::lock_guard lock(mutex_);
  return {events_.begin(), events_.end()};
}

std::vector<TraceEvent> Trace::waits() const {
  const std::lock_guard lock(mutex_);
  return {waits_.begin(), waits_.end()};
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
  trace_->add({.what = what_, .axis = {}, .begin = begin_, .end = end, .kind = kind_});
}

std::future<void> held_up_until(std::future<void> done, Trace* trace) {
  if (!trace) return done;
  return std::async(std::launch::deferred, [trace, until = std::move(done)]() mutable {
    const TraceSpan span(trace, kHeldUp, TraceKind::wait);
    until.get();
  });
}

}  // namespace tessera
