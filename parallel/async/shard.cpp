// The monitor.
#include "parallel/async/shard.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "parallel/comm/call.h"

namespace tessera {

namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr auto kPatience = std::chrono::milliseconds(100);  // between two signs of life to who waits

}  // namespace

AsyncShard::AsyncShard(std::unique_ptr<Optimizer> optimizer, Options options)
    : optimizer_(std::move(optimizer)),
      options_(std::move(options)),
      clocks_(static_cast<size_t>(options_.workers)),
      stop_(kNever) {}

void AsyncShard::go_on(const std::vector<Push>& order) {
  for (const Push& push : order)
    log_.push_back({.push = push, .applied = version(), .loss = 0, .grad_norm = 0, .lr = 0});
  clocks_ = clocks_after(order, version(), options_.workers);
  begun_ = *std::ranges::max_element(clocks_);
  if (options_.order) options_.order->go_on_at(version());
}

void AsyncShard::go_on(int64_t clock) {
  before_ = clock * options_.workers;
  clocks_.assign(clocks_.size(), clock);
  begun_ = clock;
}

void AsyncShard::begin() {
  running_ = options_.workers;
  stop_ = kNever;
}

template <class Ready>
void AsyncShard::await(std::unique_lock<std::mutex>& lock, const Waiting& waiting, const Ready& ready) {
  for (;;) {
    if (failed_) throw CommError("the server has stopped");
    if (ready()) return;
    if (changed_.wait_for(lock, kPatience) == std::cv_status::timeout && waiting) waiting();
  }
}

int64_t AsyncShard::end_of(size_t worker) const {
  return options_.order ? options_.order->clocks(static_cast<int>(worker)) : options_.steps;
}

int64_t AsyncShard::slowest() const {
  int64_t least = kNever;
  for (size_t w = 0; w < clocks_.size(); ++w)
    if (clocks_[w] < end_of(w)) least = std::min(least, clocks_[w]);
  return least;
}

bool AsyncShard::pull(int worker, int64_t clock, const Waiting& waiting,
                      const std::function<void(int64_t version)>& reply) {
  std::unique_lock lock(mutex_);
  await(lock, waiting, [&] {
    if (options_.order) return options_.order->may_pull(worker, clock, version());
    return clock >= stop_ || clock - slowest() <= options_.staleness;
  });
  if (clock >= stop_) return false;
  begun_ = std::max(begun_, clock + 1);
  summary_.most_ahead = std::max(summary_.most_ahead, clock - slowest());
  reply(version());
  if (!options_.order) return true;
  options_.order->pulled(version());
  changed_.notify_all();
  return true;
}

// Throws CommError for a push that the staleness bound of pull() rules out.
void AsyncShard::check(const Push& p) const {
  const int64_t behind = version() - p.version, bound = (options_.workers - 1) * (2 * options_.staleness + 1);
  const int64_t done = clocks_[static_cast<size_t>(p.worker)];
  if (p.clock != done || p.clock - slowest() > options_.staleness || behind < 0 || behind > bound)
    throw CommError(
        fmt::format("push of clock {} of worker {}, computed on version {}: it has done {} clocks, the "
                    "slowest worker {}, and {} pushes were applied; expected a staleness of at most {}",
                    p.clock, p.worker, p.version, done, slowest(), version(), options_.staleness));
}

void AsyncShard::push(const AppliedPush& push, double scale, const Waiting& waiting,
                      const std::function<void()>& receive) {
  const Push& p = push.push;
  std::unique_lock lock(mutex_);
  await(lock, waiting, [&] { return !options_.order || options_.order->may_push(p.worker, p.clock, version()); });
  check(p);
  receive();
  AppliedPush entry = push;
  entry.applied = version();
  entry.lr = options_.lr(entry.applied);
  optimizer_->step(entry.lr, scale);
  summary_.most_behind = std::max(summary_.most_behind, entry.applied - p.version);
  ++clocks_[static_cast<size_t>(p.worker)];
  log_.push_back(entry);
  changed_.notify_all();
}

void AsyncShard::stop() {
  const std::lock_guard lock(mutex_);
  stop_ = begun_;
  changed_.notify_all();
}

void AsyncShard::end() {
  const std::lock_guard lock(mutex_);
  --running_;
  changed_.notify_all();
}

void AsyncShard::await_end(const Waiting& waiting, const std::function<void(bool last)>& reply) {
  std::unique_lock lock(mutex_);
  await(lock, waiting, [&] { return running_ == 0; });
  bool last = true;
  for (size_t w = 0; w < clocks_.size(); ++w) last = last && clocks_[w] == end_of(w);
  reply(last);
}

void AsyncShard::fail() {
  const std::lock_guard lock(mutex_);
  failed_ = true;
  changed_.notify_all();
}

std::vector<AppliedPush> AsyncShard::applied_since(size_t first) {
  const std::lock_guard lock(mutex_);
  return {log_.begin() + static_cast<std::ptrdiff_t>(first), log_.end()};
}

AsyncSummary AsyncShard::summary() {
  const std::lock_guard lock(mutex_);
  summary_.applied = version();
  return summary_;
}

}  // namespace tessera
