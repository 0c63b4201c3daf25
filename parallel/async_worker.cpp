// The two sides of an asynchronous run: the worker's loop, and the threads of the server beside it.
#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "optim/grad_norm.h"
#include "parallel/async_server.h"
#include "tensor/cpu/vectorize.h"

namespace tessera {

void AsyncServer::work(const Step& step, const OnPush& on_push) {
  for (int64_t clock = 0; clock < clocks_; ++clock) {
    pull(AsyncMessage::pull, clock);
    model_.clear_gradients();
    const std::optional<double> loss = step(rank_, clock);
    if (!loss && !options_.replay.empty())
      throw Error(fmt::format("--replay: {} has {} steps of worker {}, which is at its end after {}", options_.replay,
                              clocks_, rank_, clock));
    if (!loss) break;
    model_.settle_gradients();
    push(clock, *loss);
    report(on_push);
  }
  end();
}

// All servers are asked before any is waited for, and the one beside this worker is waited for first: so no answer of
// one server hangs on another's.
void AsyncServer::pull(AsyncMessage::Kind kind, int64_t clock) {
  for_each_other_server([&](int k) { channel(rank_).send(k, {.kind = kind, .clock = clock}); });
  const auto copy = [&](int64_t version) {
    for (size_t u = 0; u < units_.size(); ++u) {
      const Range range = served(u, rank_);
      units_[u].values.narrow(0, range.begin, range.size()).copy_from(shards_[u].values);
    }
    versions_[static_cast<size_t>(rank_)] = version;
  };
  if (shard_ && kind == AsyncMessage::pull) shard_->pull(rank_, clock, {}, copy);
  if (shard_ && kind == AsyncMessage::last) shard_->pull_last({}, [&] { copy(0); });
  for_each_other_server([&](int k) { fetch(k); });
  for (const FlatUnit& unit : units_) ++unit.values.storage()->version;  // packed copies are stale
}

void AsyncServer::fetch(int server) {
  AsyncMessage answer;
  do answer = channel(rank_).recv(server);
  while (answer.kind == AsyncMessage::waiting);
  for (size_t u = 0; u < units_.size(); ++u) {
    const Range range = served(u, server);
    channel(rank_).recv(server, units_[u].values.narrow(0, range.begin, range.size()));
  }
  versions_[static_cast<size_t>(server)] = answer.version;
}

// A worker has its whole gradient, so it knows the norm that all servers scale by.
void AsyncServer::push(int64_t clock, double loss) {
  const double norm = grad_norm(units_);
  if (!std::isfinite(loss) || !std::isfinite(norm))
    throw Error(fmt::format("step {} of worker {}: the loss or the gradient norm is not finite; expected finite "
                            "numbers (a smaller --lr may help)",
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

void AsyncServer::end() {
  for_each_other_server([&](int k) { channel(rank_).send(k, {.kind = AsyncMessage::end}); });
  if (shard_) shard_->end(rank_);
  pull(AsyncMessage::last, 0);
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
    while (answer(worker)) {
    }
  } catch (...) {
    stop(std::current_exception());
  }
}

// One message of the worker. False after its last.
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
    shard_->pull(worker, m.clock, waiting, [&](int64_t version) { send_values(worker, version); });
  } else if (m.kind == AsyncMessage::end) {
    shard_->end(worker);
  } else {
    shard_->pull_last(waiting, [&] { send_values(worker, 0); });
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
