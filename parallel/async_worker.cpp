// The two sides of an asynchronous run: the worker's loop, and the threads of the server beside it.
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <utility>

#include "optim/grad_norm.h"
#include "parallel/async_server.h"
#include "parallel/comm/cuda/streams.h"
#include "tensor/cpu/vectorize.h"

namespace tessera {
namespace {

constexpr int64_t kNewest = std::numeric_limits<int64_t>::max();

}  // namespace

void AsyncServer::work(int64_t target, const Hooks& hooks) {
  for (bool told = false; clock_ < target; ++clock_) {
    if (!replays() && !told && hooks.wish && hooks.wish()) {
      told = true;
      wish_to_stop();
    }
    const bool stops = !pull(kNewest);
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

void AsyncServer::wish_to_stop() {
  if (rank_ == 0) return shard_->stop();
  channel(rank_).send(0, {.kind = AsyncMessage::stop});
}

// The parameters of this worker's next clock, from the servers that it does not have them from yet; in a replay those
// of versions below `before`. False when the run stops before that clock. All servers are asked before any is waited
// for, and the one beside this worker is waited for first: so no answer of one server hangs on another's.
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
  for (const FlatUnit& unit : units_) ++unit.values.storage()->version;  // packed copies are stale
  return all;
}

void AsyncServer::copy_shard() {
  for (size_t u = 0; u < units_.size(); ++u) {
    const Range range = served(u, rank_);
    units_[u].values.narrow(0, range.begin, range.size()).copy_from(shards_[u].values);
  }
}

// A server's answer: whether it has sent its parameters.
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

// A worker has its whole gradient, so it knows the norm that all servers scale by.
void AsyncServer::push(int64_t clock, double loss) {
  const double norm = grad_norm(units_);
  if (!std::isfinite(loss) || !std::isfinite(norm))
    throw Error(fmt::format("step {} of worker {}: the loss or the gradient norm is not finite; expected finite "
                            "numbers (a smaller `lr` may help)",
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

// Waits for all others. At the run's end there are parameters for everyone once more.
void AsyncServer::end() {
  for_each_other_server([&](int k) { channel(rank_).send(k, {.kind = AsyncMessage::end}); });
  if (shard_) {
    shard_->end();
    shard_->await_end({}, [&](bool last) {
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

// The cores are the workers': a server's thread computes alone.
void AsyncServer::serve(int worker) {
  try {
    cpu::set_threads(1);
    if constexpr (kWithCuda)
      if (arena_->device() == Device::cuda) cuda::use_gpu_of(*arena_);
    while (answer(worker)) {
    }
  } catch (...) {
    stop(std::current_exception());
  }
}

// One message of the worker. False after its last for now.
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
    shard_->end();
    shard_->await_end(waiting, [&](bool last) {
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

}  // namespace tessera
