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
#include "parallel/async/push_log.h"

namespace tessera {

// A push that was applied, and what came with it.
struct AppliedPush {
  Push push;
  int64_t applied = 0;  // pushes before it, of all workers: the step of the learning rate
  double loss = 0;      // loss that the worker's step function returned
  double grad_norm = 0;
  double lr = 0;
};

struct AsyncSummary {
  int64_t applied = 0;      // pushes of all workers
  int64_t most_ahead = 0;   // clocks, of a worker before the slowest when it pulled; at most the staleness
  int64_t most_behind = 0;  // versions, from a pull to its push; at most (n - 1) (2 staleness + 1)
};

class AsyncShard {
 public:
  struct Options {
    int workers = 1;
    int64_t staleness = 0, steps = 0;  // clocks that a worker may be ahead, and clocks of each worker
    std::function<double(int64_t applied)> lr;
    std::optional<PushOrder> order;  // to be replayed
  };
  // The optimizer's units are the shard. In a replay each call waits for its turn.
  AsyncShard(std::unique_ptr<Optimizer> optimizer, Options options);
  // Before all else: the parameters and the state are those after these pushes; or, of a run that was made under
  // another plan and has no order, after this clock of every worker.
  void go_on(const std::vector<Push>& order);
  void go_on(int64_t clock);
  // All workers are here again, after all have ended.
  void begin();

  // `reply` is called with the version of the parameters, and finds them in the optimizer's units; `waiting` again and
  // again while the worker may not go on. False, without a reply, when the run stops before that clock.
  using Waiting = std::function<void()>;
  bool pull(int worker, int64_t clock, const Waiting& waiting, const std::function<void(int64_t version)>& reply);
  // `receive` puts the gradient into the units' gradients; it is scaled by `scale`.
  void push(const AppliedPush& push, double scale, const Waiting& waiting, const std::function<void()>& receive);
  // All workers shall stop after the clock that the fastest has begun.
  void stop();
  // The worker pushes no more before begin(). When all have ended, `reply` is called, and told whether that was the
  // end of the run.
  void end();
  void await_end(const Waiting& waiting, const std::function<void(bool last)>& reply);
  // From now on whoever calls or waits throws CommError.
  void fail();

  Optimizer& optimizer() { return *optimizer_; }
  std::vector<AppliedPush> applied_since(size_t first);  // in order; of those that it knows
  AsyncSummary summary();

 private:
  template <class Ready>
  void await(std::unique_lock<std::mutex>& lock, const Waiting& waiting, const Ready& ready);
  int64_t slowest() const;  // clocks done by the slowest worker that has more to do
  int64_t end_of(size_t worker) const;
  int64_t version() const { return before_ + static_cast<int64_t>(log_.size()); }
  void check(const Push& push) const;

  std::unique_ptr<Optimizer> optimizer_;
  Options options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int64_t> clocks_;  // done by each worker
  int running_ = 0;
  int64_t begun_ = 0, stop_;  // clocks that the fastest worker has begun, and at which the run stops
  int64_t before_ = 0;        // pushes that the log does not have
  bool failed_ = false;
  std::vector<AppliedPush> log_;
  AsyncSummary summary_;  // but for what was applied
};

}  // namespace tessera
