// Asynchronous parameter server: worker and server roles, and the monitor.
#include "parallel/async/server.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/write_file.h"
#include "nn/units.h"
#include "optim/grad_norm.h"
#include "parallel/comm/cuda/streams.h"
#include "parallel/comm/launch.h"
#include "parallel/data_layout.h"
#include "tensor/cpu/vectorize.h"

namespace tessera {

namespace {

constexpr int64_t kMaxStale = 1'000'000'000;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr auto kKeepAlive = std::chrono::milliseconds(100);  // interval of keep-alive messages to a blocked worker

Tensor to_tensor(const std::vector<AppliedPush>& log, const ArenaPtr& arena) {
  Tensor out = Tensor::empty({std::ssize(log), 3}, DType::int64, arena->host(), Category::communication);
  int64_t* at = out.data<int64_t>();
  for (const AppliedPush& entry : log) {
    *at++ = entry.push.worker;
    *at++ = entry.push.clock;
    *at++ = entry.push.version;
  }
  return out;
}

}  // namespace

AsyncServer::AsyncServer(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options,
                         AsyncOptions async)
    : model_(model),
      axis_(axis),
      arena_(arena),
      rank_(axis.rank()),
      servers_(std::get<AsyncServerOptions>(options.strategy).servers),
      options_(std::move(async)),
      versions_(static_cast<size_t>(servers_ > 0 ? servers_ : 0)),
      fresh_(versions_.size()) {
  check_options();
  if (!options_.replay.empty()) read_replay();
  make_memory(options);
  make_shard();
  connect();
}

AsyncServer::~AsyncServer() = default;

void AsyncServer::check_options() const {
  check_servers(servers_, axis_.size());
  if (options_.staleness < 0 || options_.staleness > kMaxStale)
    throw FieldError("staleness", fmt::format("expected 0 to {} steps, got {}", kMaxStale, options_.staleness));
  if (options_.steps < 0) throw FieldError("steps", fmt::format("expected at least 0, got {}", options_.steps));
}

void AsyncServer::read_replay() {
  const std::string& file = options_.replay;
  replay_ = parse_push_log(broadcast_text(axis_, rank_ == 0 ? read_full(file) : "", 0), file);
  const auto text = [](int64_t workers, int64_t servers, int64_t staleness, int64_t steps) {
    return fmt::format("{} ranks, {} servers, staleness {} and {} steps", workers, servers, staleness, steps);
  };
  const std::string expected = text(axis_.size(), servers_, options_.staleness, options_.steps),
                    found = text(replay_.workers, std::ssize(replay_.servers), replay_.staleness, replay_.steps);
  if (found != expected)
    throw FieldError("replay", fmt::format("{} was recorded with {}; this run has {}", file, found, expected));
  for (const std::vector<Push>& order : replay_.servers) orders_.emplace_back(order, replay_.workers);
  stop_points_ = stop_points(replay_);
}

void AsyncServer::make_memory(const DataOptions& o) {
  const auto values = [&](int64_t size) { return Tensor::empty({size}, o.dtype, arena_, Category::parameters); };
  const auto grads = [&](int64_t size) { return Tensor::empty({size}, o.grad_dtype, arena_, Category::gradients); };
  for (const Module::Unit& layout : model_.layout()) {
    if (!layout.trainable) throw Error("[ps-async] '" + layout.name + "': ps-async does not support frozen parameters");
    units_.push_back(make_unit(layout, arena_, o.dtype, o.grad_dtype, o.seed));
    if (rank_ >= servers_) continue;
    const Range mine = shard_range(layout.size, servers_, rank_);
    FlatUnit& shard =
        shards_.emplace_back(FlatUnit{layout.name, values(mine.size()), grads(mine.size()), layout.slots});
    initialise(layout, shard.values, mine.begin, o.seed);
    shard.grads.fill(0);
    for (Slot& slot : shard.slots) slot.begin -= mine.begin;
  }
}

void AsyncServer::make_shard() {
  if (rank_ >= servers_) return;
  AsyncShard::Options o{.workers = axis_.size(),
                        .staleness = options_.staleness,
                        .steps = options_.steps,
                        .lr = options_.lr,
                        .order = {}};
  if (replays()) o.order = orders_[static_cast<size_t>(rank_)];
  shard_ = std::make_unique<AsyncShard>(options_.optimizer(shards_), std::move(o));
}

// One communicator per worker: the worker's rank uses it as the worker, every other rank in its server thread for that
// worker.
void AsyncServer::connect() {
  for (int w = 0; w < axis_.size(); ++w) {
    auto comm = axis_.split(0, rank_, axis_.axis());
    const bool used = w == rank_ || shard_;
    channels_.push_back(used ? std::make_unique<AsyncChannel>(std::move(comm), arena_) : nullptr);
  }
}

Range AsyncServer::served(size_t u, int server) const {
  return shard_range(units_[u].values.numel(), servers_, server);
}

void AsyncServer::resume(int64_t step, const std::optional<PushLog>& order) {
  const int n = axis_.size();
  const bool known = order && order->workers == n && order->servers.size() == static_cast<size_t>(servers_);
  if (replays()) resume_replay(known ? order : std::nullopt);
  if (!known) {
    if (!options_.record.empty())
      throw FieldError(
          "record",
          fmt::format("{} steps were run under a different plan; expected {} ranks and {} servers from the first step",
                      step, n, servers_));
    clock_ = step;
    before_ = step * n;
    if (shard_) shard_->resume(step);
    return;
  }
  reported_ = order->servers[0].size();
  const std::vector<int64_t> clocks = clocks_after(order->servers[0], static_cast<int64_t>(reported_), n);
  clock_ = clocks[static_cast<size_t>(rank_)];
  fastest_ = *std::ranges::max_element(clocks);
  staleness_before_ = order->staleness;
  if (shard_) shard_->resume(order->servers[static_cast<size_t>(rank_)]);
}

// Restores the replay position and reads from the log which servers have answered this worker's next pull.
void AsyncServer::resume_replay(const std::optional<PushLog>& order) {
  const auto begins = [](const std::vector<Push>& all, const std::vector<Push>& first) {
    return first.size() <= all.size() && std::equal(first.begin(), first.end(), all.begin());
  };
  bool same = order.has_value();
  for (size_t k = 0; same && k < orders_.size(); ++k) same = begins(replay_.servers[k], order->servers[k]);
  replayed_ = same ? std::ssize(order->servers[0]) : 0;
  if (!same || !std::ranges::binary_search(stop_points_, replayed_))
    throw FieldError(
        "replay",
        fmt::format("{} does not match the resumed run; expected a recording that begins with the pushes of this run",
                    options_.replay));
  const int64_t clock = next_clock(rank_);
  for (size_t k = 0; k < orders_.size(); ++k) {
    fresh_[k] = has_pulled(k, rank_);
    if (fresh_[k]) versions_[k] = orders_[k].version(rank_, clock);
  }
}

int64_t AsyncServer::next_clock(int worker) const {
  return clocks_after(replay_.servers[0], replayed_, axis_.size())[static_cast<size_t>(worker)];
}

bool AsyncServer::has_pulled(size_t server, int worker) const {
  const int64_t clock = next_clock(worker);
  return clock < orders_[server].clocks(worker) && orders_[server].version(worker, clock) < replayed_;
}

bool AsyncServer::holds(int worker) const {
  bool any = false;
  for (size_t k = 0; k < orders_.size(); ++k) any = any || has_pulled(k, worker);
  return any;
}

void AsyncServer::run(int64_t steps, const Hooks& hooks) {
  if (!replays()) return play(std::min(std::max(steps, fastest_), options_.steps), hooks);
  const int64_t wanted = std::min(stop_points_.back(), steps * axis_.size());
  do {
    if (replayed_ < wanted) replayed_ = *std::ranges::upper_bound(stop_points_, replayed_);
    play(next_clock(rank_), hooks);
    if (axis_.max(hooks.wants_stop && hooks.wants_stop() ? 1 : 0) > 0) return;
  } while (replayed_ < wanted);
}

void AsyncServer::play(int64_t target, const Hooks& hooks) {
  if (shard_) shard_->begin();
  std::vector<std::thread> threads;
  for (int w = 0; shard_ && w < axis_.size(); ++w)
    if (w != rank_) threads.emplace_back([this, w] { serve(w); });
  try {
    work(target, hooks);
  } catch (...) {
    stop(std::current_exception());
  }
  for (std::thread& t : threads) t.join();
  if (thrown_) std::rethrow_exception(thrown_);
  report(hooks.on_push);
}

void AsyncServer::stop(const std::exception_ptr& thrown) {
  {
    const std::lock_guard lock(stopping_);
    if (!thrown_) thrown_ = thrown;
  }
  if (shard_) shard_->fail();
  axis_.transport().fail(text_of_thrown(thrown));
}

AsyncSummary AsyncServer::finish() {
  const auto max_over_ranks = [&](int64_t x) { return static_cast<int64_t>(axis_.max(static_cast<double>(x))); };
  const AsyncSummary mine = shard_ ? shard_->summary() : AsyncSummary(),
                     summary{max_over_ranks(mine.applied), max_over_ranks(mine.max_ahead),
                             max_over_ranks(mine.max_behind)};
  if (options_.record.empty()) return summary;
  if (const std::optional<PushLog> log = order()) write_push_log(options_.record, *log);
  return summary;
}

// Every server has applied the same pushes, each in its own order.
std::optional<PushLog> AsyncServer::order() {
  if (before_ > 0 || !shard_) return {};
  const std::vector<AppliedPush> mine = shard_->applied_since(0);
  const Tensor pushes = to_tensor(mine, arena_);
  if (rank_ > 0) {
    channel(rank_).send(0, pushes);
    return {};
  }
  PushLog log{.workers = axis_.size(),
              .staleness = std::max(options_.staleness, staleness_before_),
              .steps = options_.steps,
              .servers = {}};
  for (int k = 0; k < servers_; ++k) {
    if (k > 0) channel(k).recv(k, pushes);
    std::vector<Push>& order = log.servers.emplace_back();
    for (size_t p = 0; p < mine.size(); ++p) {
      const int64_t* const n = pushes.data<int64_t>() + 3 * p;
      order.push_back({static_cast<int>(n[0]), n[1], n[2]});
    }
  }
  return log;
}

Tensor AsyncServer::gather_worker(size_t unit, int worker) {
  const Tensor& mine = units_[unit].values;
  if (rank_ == worker && rank_ > 0) axis_.send(mine, 0);
  if (rank_ > 0) return {};
  if (worker == 0) return mine;
  Tensor theirs = Tensor::empty({mine.numel()}, mine.dtype(), arena_, Category::workspace);
  axis_.recv(theirs, worker);
  return theirs;
}

Tensor AsyncServer::gather(size_t unit, const Tensor& shard) {
  const DataLayout layout{
      .sharding = ShardingKind::by_owners, .owners = servers_, .sizes = {units_[unit].values.numel()}};
  return gather_unit(axis_, layout, 0, shard);
}

void AsyncServer::work(int64_t target, const Hooks& hooks) {
  for (bool stop_requested = false; clock_ < target; ++clock_) {
    if (!replays() && !stop_requested && hooks.wants_stop && hooks.wants_stop()) {
      stop_requested = true;
      request_stop();
    }
    const bool stops = !pull(kNever);
    fresh_.assign(fresh_.size(), false);
    if (stops) break;
    model_.clear_gradients();
    const double loss = hooks.step(rank_, clock_);
    model_.zero_missing_gradients();
    push(clock_, loss);
    report(hooks.on_push);
  }
  if (replays() && clock_ < orders_[0].clocks(rank_)) pull(replayed_);
  end();
}

void AsyncServer::request_stop() {
  if (rank_ == 0) return shard_->stop();
  channel(rank_).send(0, {.kind = AsyncMessage::stop});
}

// Pulls the parameters of this worker's next clock from the servers that have not sent them yet; in a replay only
// versions below `before`. Returns false if the run stops before that clock. Requests are sent to all servers before
// any reply is awaited, and the local server is served first, so no server's reply depends on another's.
bool AsyncServer::pull(int64_t before) {
  std::vector<int> others;
  const auto lacks = [&](int k) {
    const auto server = static_cast<size_t>(k);
    return !fresh_[server] && (!replays() || orders_[server].version(rank_, clock_) < before);
  };
  for_each_other_server([&](int k) {
    if (!lacks(k)) return;
    channel(rank_).send(k, {.kind = AsyncMessage::pull, .clock = clock_});
    others.push_back(k);
  });
  bool all = true;
  if (shard_ && lacks(rank_)) {
    all = shard_->pull(rank_, clock_, {}, [&](int64_t version) {
      copy_shard();
      versions_[static_cast<size_t>(rank_)] = version;
    });
    fresh_[static_cast<size_t>(rank_)] = all;
  }
  for (const int k : others) {
    fresh_[static_cast<size_t>(k)] = fetch(k);
    all = all && fresh_[static_cast<size_t>(k)];
  }
  for (const FlatUnit& unit : units_) ++unit.values.storage()->version;  // invalidates packed copies
  return all;
}

void AsyncServer::copy_shard() {
  for (size_t u = 0; u < units_.size(); ++u) {
    const Range range = served(u, rank_);
    units_[u].values.narrow(0, range.begin, range.size()).copy_from(shards_[u].values);
  }
}

bool AsyncServer::fetch(int server) {
  AsyncMessage answer;
  do answer = channel(rank_).recv(server);
  while (answer.kind == AsyncMessage::waiting);
  if (answer.kind == AsyncMessage::none) return false;
  for (size_t u = 0; u < units_.size(); ++u) {
    const Range range = served(u, server);
    channel(rank_).recv(server, units_[u].values.narrow(0, range.begin, range.size()));
  }
  versions_[static_cast<size_t>(server)] = answer.version;
  return true;
}

// A worker has its full gradient, so it computes the norm that servers use for clipping.
void AsyncServer::push(int64_t clock, double loss) {
  const double norm = grad_norm(units_);
  if (!std::isfinite(loss) || !std::isfinite(norm))
    throw Error(fmt::format("step {} of worker {}: the loss or the gradient norm is not finite; expected finite values "
                            "(a smaller `lr` may help)",
                            clock + 1, rank_),
                Status::not_finite);
  const AsyncMessage message{.kind = AsyncMessage::push,
                             .clock = clock,
                             .scale = clip_factor(norm, options_.clip),
                             .loss = loss,
                             .norm = norm};
  for_each_other_server([&](int k) { push_to(k, message); });
  if (!shard_) return;
  const AppliedPush mine{
      .push = {rank_, clock, versions_[static_cast<size_t>(rank_)]}, .loss = loss, .grad_norm = norm};
  shard_->push(mine, message.scale, {}, [&] {
    for (size_t u = 0; u < units_.size(); ++u) {
      const Range range = served(u, rank_);
      shards_[u].grads.copy_from(units_[u].grads.narrow(0, range.begin, range.size()));
    }
  });
}

void AsyncServer::push_to(int server, const AsyncMessage& message) {
  AsyncMessage here = message;
  here.version = versions_[static_cast<size_t>(server)];
  channel(rank_).send(server, here);
  for (size_t u = 0; u < units_.size(); ++u) {
    const Range range = served(u, server);
    pushed_ += channel(rank_).send(server, units_[u].grads.narrow(0, range.begin, range.size()));
  }
}

// Waits for all workers. At the end of the run every worker pulls the final parameters.
void AsyncServer::end() {
  for_each_other_server([&](int k) { channel(rank_).send(k, {.kind = AsyncMessage::end}); });
  if (shard_) {
    shard_->end({}, [&](bool last) {
      complete_ = last;
      if (last) copy_shard();
    });
  }
  for_each_other_server([&](int k) { complete_ = fetch(k); });
  if (!complete_) return;
  for (const FlatUnit& unit : units_) ++unit.values.storage()->version;
}

void AsyncServer::report(const OnPush& on_push) {
  if (rank_ != 0 || !on_push) return;
  for (const AppliedPush& applied : shard_->applied_since(reported_)) {
    ++reported_;
    on_push(applied);
  }
}

// Server threads run single-threaded kernels, because the workers use all cores.
void AsyncServer::serve(int worker) {
  try {
    cpu::set_threads(1);
    if constexpr (kWithCuda)
      if (arena_->device() == Device::cuda) cuda::use_arena_gpu(*arena_);
    while (answer(worker)) {
    }
  } catch (...) {
    stop(std::current_exception());
  }
}

bool AsyncServer::answer(int worker) {
  AsyncChannel& to = channel(worker);
  const AsyncMessage m = to.recv(worker);
  const auto waiting = [&] { to.send(worker, {.kind = AsyncMessage::waiting}); };
  if (m.kind == AsyncMessage::push) {
    const AppliedPush push{.push = {worker, m.clock, m.version}, .loss = m.loss, .grad_norm = m.norm};
    shard_->push(push, m.scale, waiting, [&] {
      for (const FlatUnit& shard : shards_) to.recv(worker, shard.grads);
    });
  } else if (m.kind == AsyncMessage::pull) {
    if (!shard_->pull(worker, m.clock, waiting, [&](int64_t version) { send_values(worker, version); }))
      to.send(worker, {.kind = AsyncMessage::none});
  } else if (m.kind == AsyncMessage::stop) {
    shard_->stop();
  } else {
    shard_->end(waiting, [&](bool last) {
      if (last) return send_values(worker, 0);
      to.send(worker, {.kind = AsyncMessage::none});
    });
    return false;
  }
  return true;
}

void AsyncServer::send_values(int worker, int64_t version) {
  AsyncChannel& to = channel(worker);
  to.send(worker, {.kind = AsyncMessage::values, .version = version});
  for (const FlatUnit& shard : shards_) pulled_ += to.send(worker, shard.values);
}

AsyncShard::AsyncShard(std::unique_ptr<Optimizer> optimizer, Options options)
    : optimizer_(std::move(optimizer)),
      options_(std::move(options)),
      clocks_(static_cast<size_t>(options_.workers)),
      stop_(kNever) {}

void AsyncShard::resume(const std::vector<Push>& order) {
  for (const Push& push : order)
    log_.push_back({.push = push, .applied = version(), .loss = 0, .grad_norm = 0, .lr = 0});
  clocks_ = clocks_after(order, version(), options_.workers);
  begun_ = *std::ranges::max_element(clocks_);
  if (options_.order) options_.order->resume_at(version());
}

void AsyncShard::resume(int64_t clock) {
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
    if (changed_.wait_for(lock, kKeepAlive) == std::cv_status::timeout && waiting) waiting();
  }
}

int64_t AsyncShard::end_time(size_t worker) const {
  return options_.order ? options_.order->clocks(static_cast<int>(worker)) : options_.steps;
}

int64_t AsyncShard::slowest() const {
  int64_t min_clock = kNever;
  for (size_t w = 0; w < clocks_.size(); ++w)
    if (clocks_[w] < end_time(w)) min_clock = std::min(min_clock, clocks_[w]);
  return min_clock;
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
  summary_.max_ahead = std::max(summary_.max_ahead, clock - slowest());
  reply(version());
  if (!options_.order) return true;
  options_.order->pulled(version());
  changed_.notify_all();
  return true;
}

// Throws CommError if the push violates the staleness bound of pull().
void AsyncShard::check(const Push& p) const {
  const int64_t behind = version() - p.version, bound = (options_.workers - 1) * (2 * options_.staleness + 1);
  const int64_t done = clocks_[static_cast<size_t>(p.worker)];
  if (p.clock != done || p.clock - slowest() > options_.staleness || behind < 0 || behind > bound)
    throw CommError(
        fmt::format("push for clock {} from worker {}, computed on version {}: the worker has completed {} clocks, the "
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
  summary_.max_behind = std::max(summary_.max_behind, entry.applied - p.version);
  ++clocks_[static_cast<size_t>(p.worker)];
  log_.push_back(entry);
  changed_.notify_all();
}

void AsyncShard::stop() {
  const std::lock_guard lock(mutex_);
  stop_ = begun_;
  changed_.notify_all();
}

void AsyncShard::end(const Waiting& waiting, const std::function<void(bool last)>& reply) {
  std::unique_lock lock(mutex_);
  --running_;
  changed_.notify_all();
  await(lock, waiting, [&] { return running_ == 0; });
  bool last = true;
  for (size_t w = 0; w < clocks_.size(); ++w) last = last && clocks_[w] == end_time(w);
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
