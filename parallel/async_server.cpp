// A run's beginning and end: memory, connections, the record.
#include "parallel/async_server.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "parallel/server_cut.h"

namespace tessera {
namespace {

constexpr int64_t kMostStale = 1'000'000'000;

// The same text on every rank; rank 0 has it.
std::string shared_text(Communicator& axis, const std::string& text, const ArenaPtr& arena) {
  const auto size = static_cast<int64_t>(axis.max(axis.rank() == 0 ? static_cast<double>(text.size()) : 0));
  Tensor words = Tensor::zeros({size / 4 + 1}, DType::int32, arena);
  if (!text.empty()) std::memcpy(words.raw(), text.data(), text.size());
  axis.broadcast(words, 0);
  return {reinterpret_cast<const char*>(words.raw()), static_cast<size_t>(size)};
}

std::string cause_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& e) {
    return e.what();
  }
}

Tensor numbers_of(const std::vector<AppliedPush>& log, const ArenaPtr& arena) {
  Tensor out = Tensor::empty({static_cast<int64_t>(log.size()), 3}, DType::int64, arena, Category::communication);
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
      servers_(options.servers),
      options_(std::move(async)),
      clocks_(options_.steps),
      versions_(static_cast<size_t>(options.servers > 0 ? options.servers : 0)) {
  check_options();
  const PushLog replay = options_.replay.empty() ? PushLog() : read_replay();
  make_memory(options);
  make_shard(replay);
  if (!options_.replay.empty()) clocks_ = PushOrder(replay.servers[0], axis.size()).clocks(rank_);
  connect();
}

AsyncServer::~AsyncServer() = default;

void AsyncServer::check_options() const {
  check_servers(servers_, axis_.size());
  if (options_.staleness < 0 || options_.staleness > kMostStale)
    throw Error(fmt::format("--staleness: expected 0 to {} steps, found {}", kMostStale, options_.staleness));
  if (options_.steps < 0) throw Error(fmt::format("--steps: expected at least 0, found {}", options_.steps));
}

PushLog AsyncServer::read_replay() {
  const std::string& file = options_.replay;
  PushLog log = parse_push_log(shared_text(axis_, rank_ == 0 ? read_push_log(file) : std::string(), arena_), file);
  const auto text = [](int64_t workers, int64_t servers, int64_t staleness, int64_t steps) {
    return fmt::format("{} ranks, {} servers, staleness {} and {} steps", workers, servers, staleness, steps);
  };
  const std::string expected = text(axis_.size(), servers_, options_.staleness, options_.steps),
                    found = text(log.workers, static_cast<int64_t>(log.servers.size()), log.staleness, log.steps);
  if (found != expected)
    throw Error(fmt::format("--replay: {} was recorded with {}; this run has {}", file, found, expected));
  return log;
}

void AsyncServer::make_memory(const DataOptions& o) {
  for (const Module::Unit& layout : model_.layout()) {
    const auto memory = [&](int64_t size, int64_t begin) {
      FlatUnit unit{layout.name, Tensor::empty({size}, o.dtype, arena_, Category::parameters),
                    Tensor::empty({size}, o.grad_dtype, arena_, Category::gradients), layout.slots};
      initialise(layout, unit.values, begin, o.seed);
      unit.grads.fill(0);
      for (Slot& slot : unit.slots) slot.begin -= begin;
      return unit;
    };
    units_.push_back(memory(layout.size, 0));
    bind_values(layout, units_.back().values);
    bind_gradients(layout, units_.back().grads);
    const Range mine = served_range(layout.size, servers_, rank_);
    if (rank_ < servers_) shards_.push_back(memory(mine.size(), mine.begin));
  }
}

void AsyncServer::make_shard(const PushLog& replay) {
  if (rank_ >= servers_) return;
  AsyncShard::Options o{.workers = axis_.size(), .staleness = options_.staleness, .lr = options_.lr, .order = {}};
  if (!options_.replay.empty()) o.order.emplace(replay.servers[static_cast<size_t>(rank_)], replay.workers);
  shard_ = std::make_unique<AsyncShard>(options_.optimizer(shards_), std::move(o));
}

// A communicator for each worker, used on its rank by the worker and on the others by the server's thread for it.
void AsyncServer::connect() {
  for (int w = 0; w < axis_.size(); ++w) {
    auto comm = axis_.split(0, rank_, axis_.axis());
    const bool used = w == rank_ || shard_;
    channels_.push_back(used ? std::make_unique<AsyncChannel>(std::move(comm), arena_) : nullptr);
  }
}

Range AsyncServer::served(size_t u, int server) const {
  return served_range(units_[u].values.numel(), servers_, server);
}

AsyncSummary AsyncServer::run(const Step& step, const OnPush& on_push) {
  std::vector<std::thread> threads;
  for (int w = 0; shard_ && w < axis_.size(); ++w)
    if (w != rank_) threads.emplace_back([this, w] { serve(w); });
  try {
    work(step, on_push);
  } catch (...) {
    stop(std::current_exception());
  }
  for (std::thread& t : threads) t.join();
  if (thrown_) std::rethrow_exception(thrown_);
  report(on_push);
  return finish();
}

// The first failure is this rank's cause. Everybody who waits here or elsewhere is told.
void AsyncServer::stop(const std::exception_ptr& thrown) {
  {
    const std::lock_guard lock(stopping_);
    if (!thrown_) thrown_ = thrown;
  }
  if (shard_) shard_->fail();
  axis_.transport().fail(cause_of(thrown));
}

AsyncSummary AsyncServer::finish() {
  const std::vector<AppliedPush> mine = shard_ ? shard_->applied_since(0) : std::vector<AppliedPush>();
  const auto most = [&](int64_t of_shard) { return static_cast<int64_t>(axis_.max(static_cast<double>(of_shard))); };
  const AsyncSummary summary{.applied = most(static_cast<int64_t>(mine.size())),
                             .most_ahead = most(shard_ ? shard_->most_ahead() : 0),
                             .most_behind = most(shard_ ? shard_->most_behind() : 0)};
  if (!options_.record.empty()) write_record(mine);
  return summary;
}

// Every server has applied the same pushes, each in its own order.
void AsyncServer::write_record(const std::vector<AppliedPush>& mine) {
  if (!shard_) return;
  const Tensor numbers = numbers_of(mine, arena_);
  if (rank_ > 0) return static_cast<void>(channel(rank_).send(0, numbers));
  PushLog log{.workers = axis_.size(), .staleness = options_.staleness, .steps = options_.steps, .servers = {}};
  for (int k = 0; k < servers_; ++k) {
    if (k > 0) channel(k).recv(k, numbers);
    std::vector<Push>& order = log.servers.emplace_back();
    for (size_t p = 0; p < mine.size(); ++p) {
      const int64_t* const n = numbers.data<int64_t>() + 3 * p;
      order.push_back({static_cast<int>(n[0]), n[1], n[2]});
    }
  }
  write_push_log(options_.record, log);
}

Tensor AsyncServer::gather(size_t unit, const Tensor& shard) {
  return gather_served(axis_, servers_, units_[unit].values.numel(), shard);
}

}  // namespace tessera
