// One server of the asynchronous parameter server: its part of the parameters, and the rules of who may pull and push
// when. A monitor: any thread may call it, one is inside at a time.
//
// The rule of stale synchronous parallel (Ho et al. 2013): a worker may begin its clock c when every worker that has
// not ended has done c - staleness clocks, else it waits. So between a worker's pull and its push any other worker
// pushes at most 2 staleness + 1 times: it was at most `staleness` clocks behind, and gets at most `staleness` ahead.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "optim/optimizer.h"
#include "parallel/push_log.h"

namespace tessera {

// A push that was applied, and what came with it.
struct AppliedPush {
  Push push;
  int64_t applied = 0;  // pushes before it, of all workers: the step of the learning rate
  double loss = 0;      // what the worker's step function returned
  double grad_norm = 0;
  double lr = 0;
};

class AsyncShard {
 public:
  struct Options {
    int workers = 1;
    int64_t staleness = 0;
    std::function<double(int64_t applied)> lr;
    std::optional<PushOrder> order;  // to be replayed
  };
  // The optimizer's units are the shard. In a replay each call waits for its turn.
  AsyncShard(std::unique_ptr<Optimizer> optimizer, Options options);

  // `reply` is called with the version of the parameters, and finds them in the optimizer's units; `waiting` again and
  // again while the worker may not go on.
  using Waiting = std::function<void()>;
  void pull(int worker, int64_t clock, const Waiting& waiting, const std::function<void(int64_t version)>& reply);
  // `receive` puts the gradient into the units' gradients; it is scaled by `scale`.
  void push(const AppliedPush& push, double scale, const Waiting& waiting, const std::function<void()>& receive);
  // The worker pushes no more: nobody waits for it.
  void end(int worker);
  // The parameters after all workers have ended.
  void pull_last(const Waiting& waiting, const std::function<void()>& reply);
  // From now on whoever calls or waits throws CommError.
  void fail();

  Optimizer& optimizer() { return *optimizer_; }
  std::vector<AppliedPush> applied_since(size_t first);  // in order
  int64_t most_ahead();                                  // clocks, of a worker before the slowest when it pulled
  int64_t most_behind();                                 // versions, from a worker's pull to its push

 private:
  template <class Ready>
  void await(std::unique_lock<std::mutex>& lock, const Waiting& waiting, const Ready& ready);
  int64_t slowest() const;  // clocks done by the slowest worker that has not ended
  int64_t applied() const { return static_cast<int64_t>(log_.size()); }
  void check(const Push& push) const;

  std::unique_ptr<Optimizer> optimizer_;
  Options options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int64_t> clocks_;  // done by each worker
  std::vector<bool> ended_;
  int running_;
  bool failed_ = false;
  std::vector<AppliedPush> log_;
  int64_t most_ahead_ = 0, most_behind_ = 0;
};

}  // namespace tessera
