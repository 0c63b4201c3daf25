// The asynchronous parameter server with bounded staleness: each worker pulls parameters, computes the gradient of its
// own batch, and pushes it; a server applies each push immediately. A worker waits only if it is more than `staleness`
// clocks ahead of the slowest (Ho et al. 2013, NIPS, "More effective distributed ML via a stale synchronous parallel
// parameter server"; servers and workers as in Li et al. 2014).
//
//   worker 0   | pull 0 | compute | push 0, pull 2 | compute  | push 2, pull 4 ...      the numbers are versions:
//   worker 1   | pull 0 | compute    | push 1, pull 3 | compute    | push 3 ...         applied pushes
//   server     0        ------>       1   2            ------>     3    4
//
// placements     each worker has a replica of the parameters, as of its last pull, and its own gradient; a server's
//                shard and its optimizer state are S(0) over the first K ranks
// memory/rank    unsharded parameters and gradients; a server also 1/K of parameters, gradients and optimizer state
// volume         per clock and worker: S bytes of parameters in (and again at the end) and S bytes of gradients out,
//                except the shard of a server on its own rank; plus messages of 48 bytes
//
// A worker's clocks count its pushes. Its gradient is a mean over its own tokens, so each push is a full optimizer step
// on a small batch: n workers make n steps for each step of a synchronous run, and the learning rate follows the count
// of applied pushes. The result depends on worker timing, but a replay of the recorded order
// (parallel/async/push_log.h) is bitwise identical.
//
// A run stops once all workers have completed the latest clock that any worker has begun, so its checkpoint is like
// that of a synchronous run. A replay can stop only when every server has applied the same recorded pushes
// (stop_points()). Workers may then be at different clocks and may have pulled versions that no server still has, so
// the checkpoint includes their parameters.
//
// A server has one thread and one communicator per remote worker, so it serves while the local worker computes.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "optim/optimizer.h"
#include "parallel/async/push_log.h"
#include "parallel/comm/communicator.h"
#include "parallel/data_strategy.h"

namespace tessera {

struct AppliedPush {
  Push push;
  int64_t applied = 0;  // earlier pushes of all workers: the learning-rate step
  double loss = 0;
  double grad_norm = 0;
  double lr = 0;
};

struct AsyncSummary {
  int64_t applied = 0;
  int64_t max_ahead = 0;   // clocks ahead of the slowest worker at a pull; at most the staleness
  int64_t max_behind = 0;  // versions, from a pull to its push; at most (n - 1) (2 staleness + 1)
};

// A server's shard of the parameters. A monitor: thread-safe, one caller at a time.
//
// Stale synchronous parallel (Ho et al. 2013): a worker may begin its clock c when every unfinished worker has
// completed c - staleness clocks. So between a worker's pull and its push any other worker pushes at most 2 staleness +
// 1 times: from at most `staleness` clocks behind to at most `staleness` ahead.

class AsyncShard {
 public:
  struct Options {
    int workers = 1;
    int64_t staleness = 0, steps = 0;  // clocks that a worker may be ahead; clocks per worker
    std::function<double(int64_t applied)> lr;
    std::optional<PushOrder> order;  // to replay
  };
  // `optimizer` updates the shard. In a replay each call blocks until its turn in the recorded order.
  AsyncShard(std::unique_ptr<Optimizer> optimizer, Options options);
  // Call first, with the pushes already applied or, if their order is unknown, the clock of every worker.
  void resume(const std::vector<Push>& order);
  void resume(int64_t clock);
  void begin();

  // Calls `reply` with the version of the optimizer's units, and `waiting` repeatedly while the worker is blocked.
  // Returns false without a reply if the run stops before that clock.
  using Waiting = std::function<void()>;
  bool pull(int worker, int64_t clock, const Waiting& waiting, const std::function<void(int64_t version)>& reply);
  // `receive` writes the gradient into the optimizer's units.
  void push(const AppliedPush& push, double scale, const Waiting& waiting, const std::function<void()>& receive);
  // Stops all workers after the latest clock that any worker has begun.
  void stop();
  // The worker pushes nothing more before begin(). When all workers have ended, calls `reply`; `last`: the run is
  // complete.
  void end(const Waiting& waiting, const std::function<void(bool last)>& reply);
  // All current and later calls throw CommError.
  void fail();

  Optimizer& optimizer() { return *optimizer_; }
  std::vector<AppliedPush> applied_since(size_t first);  // in order, if known
  AsyncSummary summary();

 private:
  template <class Ready>
  void await(std::unique_lock<std::mutex>& lock, const Waiting& waiting, const Ready& ready);
  int64_t slowest() const;  // completed clocks of the slowest unfinished worker
  int64_t end_time(size_t worker) const;
  int64_t version() const { return before_ + static_cast<int64_t>(log_.size()); }
  void check(const Push& push) const;

  std::unique_ptr<Optimizer> optimizer_;
  Options options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int64_t> clocks_;
  int running_ = 0;
  int64_t begun_ = 0, stop_;  // clocks begun by the fastest worker; clock at which the run stops
  int64_t before_ = 0;        // pushes before the log
  bool failed_ = false;
  std::vector<AppliedPush> log_;
  AsyncSummary summary_;
};

// Messages between a worker and a server:
//
//   worker -> server   pull (clock)
//                      push (clock, version, scale, loss, norm)    then the gradients of the server's shard
//                      stop                                        to server 0: stop all workers at one clock
//                      end                                         no more pushes for now
//   server -> worker   values (version)                            then the parameters of the server's shard
//                      none                                        no parameters: the run stops early
//                      waiting                                     keep-alive while blocked
//
// Messages between two ranks arrive in order, so a push is applied before its worker's next pull is answered. An end is
// answered when all workers have ended.

struct AsyncMessage {
  enum Kind : int64_t { pull, push, stop, end, values, none, waiting };
  int64_t kind = pull, clock = 0, version = 0;
  double scale = 1, loss = 0, norm = 0;
};

// Not thread-safe.
class AsyncChannel {
 public:
  AsyncChannel(std::unique_ptr<Communicator> comm, const ArenaPtr& arena)
      : comm_(std::move(comm)),
        memory_(Tensor::empty({sizeof(AsyncMessage) / 8}, DType::int64, arena->host(), Category::communication)) {}

  void send(int to, const AsyncMessage& message) {
    std::memcpy(memory_.raw(), &message, sizeof(message));
    comm_->send(memory_, to);
  }
  AsyncMessage recv(int from) {
    AsyncMessage message;
    comm_->recv(memory_, from);
    std::memcpy(&message, memory_.raw(), sizeof(message));
    return message;
  }
  int64_t send(int to, const Tensor& x) {
    if (x.numel() > 0) comm_->send(x, to);
    return x.nbytes();
  }
  void recv(int from, const Tensor& x) {
    if (x.numel() > 0) comm_->recv(x, from);
  }

 private:
  std::unique_ptr<Communicator> comm_;
  Tensor memory_;
};

struct AsyncOptions {
  int64_t steps = 0;
  int64_t staleness = 0;
  double clip = 0;  // maximum gradient norm; 0: off
  std::function<std::unique_ptr<Optimizer>(const std::vector<FlatUnit>&)> optimizer = {};
  std::function<double(int64_t applied)> lr = {};  // after `applied` pushes; thread-safe
  std::string record = {}, replay = {};            // files; empty: none
};

class AsyncServer : NotCopied {
 public:
  // Allocates and initializes the model's parameters. Collective over `axis`, which like `model` must outlive this
  // object. Throws Error (usage) for invalid options, and InputError for a replay file that is not a log of such a run.
  AsyncServer(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options, AsyncOptions async);

  // Runs forward and backward for the batch of (worker, clock) and returns the loss to report; the gradient is a mean
  // over the batch's tokens.
  using Step = std::function<double(int worker, int64_t clock)>;
  // Called on rank 0 for server 0's pushes, in order, by the thread that called run(), between two steps.
  using OnPush = std::function<void(const AppliedPush&)>;
  // A stop request from any rank stops all ranks.
  using WantsStop = std::function<bool()>;
  struct Hooks {
    Step step = {};
    OnPush on_push = {};
    WantsStop wants_stop = {};
  };

  // Resumes a run that stopped after `step` steps: call it after loading shards(), the optimizer, and the units of each
  // worker with holds(), before run(). `order` is order() at the stop. If it is missing or its number of workers or
  // servers differs, every worker must have completed `step` steps, and the order is unknown from then on. Throws Error
  // (usage) if recording or replay requires the order.
  void resume(int64_t step, const std::optional<PushLog>& order);
  // Runs until each worker has completed `steps` steps or the full run, or a rank requests a stop; a replay may run
  // slightly longer. Collective; call again to continue. After the last step every rank's model has the same final
  // parameters. Throws the error of a failed rank, and Error (not_finite) for a loss or gradient that is not finite.
  void run(int64_t steps, const Hooks& hooks);
  bool complete() const { return complete_; }
  // Steps completed by every worker; in a replay, the mean over workers.
  int64_t steps() const { return replays() ? replayed_ / axis_.size() : clock_; }
  // Writes the record, even if the run was stopped. Collective.
  AsyncSummary finish();

  // On rank 0 the order so far, if it is completely known. Collective.
  std::optional<PushLog> order();
  // Whether a worker has pulled parameters for its next clock; a stopped replay continues with them.
  bool holds(int worker) const;
  const std::vector<FlatUnit>& units() const { return units_; }  // this worker's
  const std::vector<FlatUnit>& shards() const { return shards_; }
  // On rank 0; undefined on other ranks. Collective.
  Tensor gather_worker(size_t unit, int worker);

  Optimizer* optimizer() { return shard_ ? &shard_->optimizer() : nullptr; }
  // gather_unit() of a tensor sharded like a unit. `shard` is undefined on ranks without a server.
  Tensor gather(size_t unit, const Tensor& shard);
  int64_t pushed_bytes() const { return pushed_; }
  int64_t pulled_bytes() const { return pulled_; }

 private:
  void check_options() const;
  void make_memory(const DataOptions& options);
  void read_replay();
  void make_shard();
  void connect();
  void resume_replay(const std::optional<PushLog>& order);
  int64_t next_clock(int worker) const;
  bool has_pulled(size_t server, int worker) const;
  void play(int64_t target, const Hooks& hooks);
  void work(int64_t target, const Hooks& hooks);
  bool pull(int64_t before);
  bool fetch(int server);
  void push(int64_t clock, double loss);
  void push_to(int server, const AsyncMessage& message);
  void request_stop();
  void end();
  void report(const OnPush& on_push);
  void serve(int worker);
  bool answer(int worker);
  void send_values(int worker, int64_t version);

  void stop(const std::exception_ptr& thrown);
  bool replays() const { return !orders_.empty(); }
  void copy_shard();
  Range served(size_t unit, int server) const;
  AsyncChannel& channel(int worker) { return *channels_[static_cast<size_t>(worker)]; }
  template <class F>
  void for_each_other_server(const F& f) const {
    for (int k = 0; k < servers_; ++k)
      if (k != rank_) f(k);
  }

  Module& model_;
  Communicator& axis_;
  ArenaPtr arena_;
  int rank_, servers_;
  AsyncOptions options_;
  int64_t clock_ = 0;
  int64_t before_ = 0;            // pushes of all workers before the known order
  int64_t staleness_before_ = 0;  // staleness bound before the resume
  int64_t fastest_ = 0;           // clocks of the fastest worker at the resume
  bool complete_ = false;
  PushLog replay_;  // empty: no replay
  std::vector<PushOrder> orders_;
  std::vector<int64_t> stop_points_;
  int64_t replayed_ = 0;  // pushes
  std::vector<FlatUnit> units_;
  std::vector<FlatUnit> shards_;
  std::unique_ptr<AsyncShard> shard_;  // on servers
  std::vector<std::unique_ptr<AsyncChannel>>
      channels_;  // by worker: this worker's to its servers, the others' to this server
  std::vector<int64_t> versions_;
  std::vector<bool> fresh_;  // by server: whether versions_ is for the next clock
  int64_t pushed_ = 0;
  std::atomic<int64_t> pulled_{0};
  size_t reported_ = 0;
  std::mutex stopping_;
  std::exception_ptr thrown_;
};

}  // namespace tessera
