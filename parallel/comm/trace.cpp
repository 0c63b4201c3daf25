// Trace recording and stall reports.
#include "parallel/comm/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "base/utf8.h"

namespace tessera {

namespace {
constexpr int64_t kMinFraction = 32;  // changes below 1 / kMinFraction of the peak are sampled with the next event
double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
int64_t sum(const std::array<int64_t, kCategories>& x) { return std::accumulate(x.begin(), x.end(), int64_t{0}); }
}  // namespace

Trace::Trace(size_t max_steps) : began_(seconds()), max_steps_(max_steps), recording_(max_steps == 0) {}
Trace::~Trace() { watch(nullptr); }
double Trace::now() const { return seconds() - began_; }

double Trace::cpu_now() {
  std::timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

void Trace::add(TraceEvent event) {
  const std::lock_guard lock(mutex_);
  if (!recording_) return;
  (event.kind == TraceKind::wait ? waits_ : events_).push_back(std::move(event));
  sample();
}

// The arena calls back while it holds its own lock, so mutex_ must not be held here.
void Trace::watch(ArenaPtr arena) {
  if (arena_) tessera::watch(*arena_, nullptr);
  arena_ = std::move(arena);
  if (arena_) tessera::watch(*arena_, [this](const auto& live) { changed(live); });
}

void Trace::changed(const std::array<int64_t, kCategories>& live) {
  const std::lock_guard lock(mutex_);
  live_ = live;
  const int64_t bytes = sum(live);
  peak_ = std::max(peak_, bytes);
  if (recording_ && std::abs(bytes - sampled_) * kMinFraction >= peak_) sample();
}

void Trace::begin_step(int64_t step) {
  const std::lock_guard lock(mutex_);
  const double time = now();
  steps_.push_back({step, time, time});
  forget();
  recording_ = true;
  sample();
}

void Trace::end_step() {
  const std::lock_guard lock(mutex_);
  sample();
  steps_.back().end = now();
  recording_ = max_steps_ == 0;
}

void Trace::sample() {
  if (!arena_) return;
  memory_.push_back({.time = now(), .live = live_});
  sampled_ = sum(live_);
}

void Trace::forget() {
  if (max_steps_ == 0 || steps_.size() <= max_steps_) return;
  while (steps_.size() > max_steps_) steps_.pop_front();
  const double oldest = steps_.front().begin;
  for (std::deque<TraceEvent>* list : {&events_, &waits_})
    std::erase_if(*list, [&](const TraceEvent& e) { return e.begin < oldest; });
  std::erase_if(memory_, [&](const TraceMemory& m) { return m.time < oldest; });
}

TraceSpan::~TraceSpan() {
  if (!trace_) return;
  const double end = trace_->now();
  trace_->add({.what = what_, .axis = {}, .begin = begin_, .end = end, .kind = kind_});
}

std::future<void> trace_stall(std::future<void> done, Trace* trace) {
  if (!trace) return done;
  return std::async(std::launch::deferred, [trace, until = std::move(done)]() mutable {
    const TraceSpan span(trace, kStall, TraceKind::wait);
    until.get();
  });
}

bool StallReporter::is_news(const std::string& axis, int missing) {
  const std::lock_guard lock(mutex_);
  return reported_.insert({axis, missing}).second;
}

Flight::Flight(int rank, int ranks, std::shared_ptr<StallReporter> waits)
    : rank_(rank),
      stall_reporter_(std::move(waits)),
      first_tick_(ticks()),
      start_(std::chrono::steady_clock::now()),
      waited_ns_(static_cast<size_t>(ranks)) {}

double Flight::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

double Flight::seconds_at(uint64_t tick) const {
  const double per_tick = seconds() / static_cast<double>(std::max<uint64_t>(1, ticks() - first_tick_));
  return static_cast<double>(static_cast<int64_t>(tick - first_tick_)) * per_tick;
}

int Flight::axis(const std::string& name) {
  const std::lock_guard lock(naming_);
  const auto found = std::ranges::find(axes_, name);
  const auto at = found - axes_.begin();
  if (found == axes_.end() && axes_.size() < kAxes) axes_.push_back(name);
  return static_cast<int>(std::min<std::ptrdiff_t>(at, kAxes - 1));
}

void Flight::waited(int world_rank, double seconds) {
  waited_ns_[static_cast<size_t>(world_rank)].fetch_add(static_cast<int64_t>(seconds * 1e9), std::memory_order_relaxed);
}

std::vector<double> Flight::waits() const {
  std::vector<double> out;
  for (const std::atomic<int64_t>& ns : waited_ns_) out.push_back(static_cast<double>(ns.load()) / 1e9);
  return out;
}

void Flight::overdue(const std::string& axis, const std::string& during, int missing, const std::string& last,
                     double seconds, bool again) {
  if (!again && !stall_reporter_->is_news(axis, missing)) return;
  const std::string peer = missing < 0 ? "other ranks" : fmt::format("rank {}", missing);
  stall_reporter_->say(fmt::format("[rank {}] has waited {} in {} on axis {} for {}{}", rank_, seconds_text(seconds),
                                   during, axis, peer, last.empty() ? "" : " (" + last + ")"));
}

std::string Flight::to_json(const std::string& cause) const {
  std::string out = fmt::format(R"({{"rank": {}, "ranks": {}, "cause": {}, "operations": [)", rank_, waited_ns_.size(),
                                quoted_text(cause));
  const uint64_t made = made_.load();
  const std::lock_guard lock(naming_);
  bool first = true;
  for (uint64_t ticket = made > kEntries ? made - kEntries : 0; ticket < made; ++ticket) {
    const Entry& e = entries_[ticket % kEntries];
    const uint64_t kind = e.kind.load(), ended = e.ended.load();
    out += fmt::format(
        R"({}{{"axis": {}, "number": {}, "operation": "{}", "bytes": {}, "begun": {:.6f}, "ended": {}}})",
        first ? "" : ", ", quoted_text(axes_.at(kind >> 8)), e.number.load(), to_string(static_cast<Op>(kind & 0xff)),
        e.bytes.load(), seconds_at(e.begun.load()), ended == 0 ? "null" : fmt::format("{:.6f}", seconds_at(ended)));
    first = false;
  }
  return out + "]}\n";
}

}  // namespace tessera
