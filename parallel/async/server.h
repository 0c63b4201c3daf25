// The asynchronous parameter server with bounded staleness: the rules of one server (AsyncShard), what workers and
// servers say to each other (AsyncMessage), and both on one rank (AsyncServer).
#pragma once
#include <condition_variable>
#include <cstring>
#include <exception>

#include "optim/optimizer.h"
#include "parallel/async/push_log.h"
#include "parallel/comm/communicator.h"
#include "parallel/data_strategy.h"

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

// One server of the asynchronous parameter server: its part of the parameters, and the rules of who may pull and push
// when. A monitor: any thread may call it, one is inside at a time.
//
// The rule of stale synchronous parallel (Ho et al. 2013): a worker may begin its clock c when every worker that has
// not ended has done c - staleness clocks, else it waits. So between a worker's pull and its push any other worker
// pushes at most 2 staleness + 1 times: it was at most `staleness` clocks behind, and gets at most `staleness` ahead.

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
  // A worker pushes no more before begin(). When all have ended, `reply` is called, and told whether that was the end
  // of the run.
  void end(const Waiting& waiting, const std::function<void(bool last)>& reply);
  // From now on whoever calls or waits throws CommError.
  void fail();

  Optimizer& optimizer() { return *optimizer_; }
  std::vector<AppliedPush> applied_since(size_t first);  // in order; of those that it knows
  AsyncSummary summary();

 private:
  template <class Ready>
  void await(std::unique_lock<std::mutex>& lock, const Waiting& waiting, const Ready& ready);
  int64_t slowest() const;  // clocks done by the slowest worker that has more to do
  int64_t end_time(size_t worker) const;
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

// The messages between a worker and a server of the asynchronous parameter server, point to point.
//
//   worker -> server   pull (clock)                                      then nothing
//                      push (clock, version, scale, loss, norm)          then the gradients that the server keeps
//                      stop                                              to server 0: let all come to one clock and
//                      stop end                                               no more pushes for now
//   server -> worker   values (version)                                  then the parameters that the server keeps
//                      none                                              no parameters: the run stops before its end
//                      waiting                                           not yet: a sign of life
//
// Messages between two ranks arrive in order, so a push is applied before the next pull of its worker is answered. An
// end is answered when all workers have ended.

struct AsyncMessage {
  enum Kind : int64_t { pull, push, stop, end, values, none, waiting };
  int64_t kind = pull, clock = 0, version = 0;
  double scale = 1, loss = 0, norm = 0;
};

// A communicator for one worker's connections, and the host's memory for a message. Used by one thread of a rank at a
// time.
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
  // Tensors of no elements are not sent.
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

// The asynchronous parameter server with bounded staleness: no step is common to all. Each worker pulls parameters,
// computes the gradient of its own batch, and pushes it; a server applies each push at once. Nobody waits for a slow
// worker until it is more than `staleness` of its clocks behind (Ho et al. 2013, NIPS, "More effective distributed ML
// via a stale synchronous parallel parameter server"; servers and workers as in Li et al. 2014).
//
//   worker 0   | pull 0 | compute | push 0, pull 2 | compute  | push 2, pull 4 ...      the numbers are versions: how
//   worker 1   | pull 0 | compute    | push 1, pull 3 | compute    | push 3 ...         many pushes were applied
//   server     0        ------>       1   2            ------>     3    4
//
// placements     a worker's parameters are its own, as it last pulled them; its gradient is its own. A server's shard
//                and its optimizer state are S(0) over the first K ranks
// memory/rank    parameters and gradients whole; a server (one of K) has another 1/K of the parameters, of the
//                gradients and of the optimizer state
// volume         for each clock of each worker S bytes of parameters in (also once more at the end) and S bytes of
//                gradients out, less what the server beside it keeps; messages of 48 bytes beside each
//
// A worker's clocks count its pushes. Its gradient is a mean over its own tokens, so each push is a whole optimizer
// step of a small batch: n workers make n steps where a synchronous run makes one, and the learning rate goes by the
// count of applied pushes. The run depends on which worker is fast. The order of pushes is recorded
// (parallel/async/push_log.h), and a replay of the record gives the same bits: parameters, optimizer state and losses.
//
// A run stops when all workers have made the same number of clocks: a rank that wants to stop tells server 0, and all
// continue to the clock that the fastest has begun. So the checkpoint is like that of any plan. A replay can stop only
// where its record gives every server the same pushes (common_places()). There workers differ in their clocks. A worker
// may have pulled parameters for its next clock, and no server has that version any more, so the checkpoint has it.
//
// A server has a thread for each of the other workers, so that it serves while the worker beside it computes; each
// connection is a communicator of its own.

struct AsyncOptions {
  int64_t steps = 0;      // clocks of each worker
  int64_t staleness = 0;  // clocks that a worker may be ahead of the slowest
  double clip = 0;        // bound on each push's gradient norm; 0: off
  std::function<std::unique_ptr<Optimizer>(const std::vector<FlatUnit>&)> optimizer = {};
  std::function<double(int64_t applied)> lr = {};  // learning rate of a push after `applied` others; from any thread
  std::string record = {}, replay = {};            // files; empty: none
};

class AsyncServer : NotCopied {
 public:
  // Gives the model's parameters memory and first values. Every rank of `axis` calls it; model and axis must outlive
  // it. Throws Error (usage) for options that do not fit, and InputError for a replay that is no log of such a run.
  AsyncServer(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options, AsyncOptions async);
  ~AsyncServer();

  // Forward and backward of the batch of (worker, clock), with a gradient that is a mean over that batch's tokens.
  // Returns the loss to be reported.
  using Step = std::function<double(int worker, int64_t clock)>;
  // The pushes that server 0 has applied, in order; called on rank 0 by the thread that called run(), between two of
  // its steps.
  using OnPush = std::function<void(const AppliedPush&)>;
  // Whether this rank wants to stop; if one does, all stop.
  using Wish = std::function<bool()>;
  struct Hooks {
    Step step = {};
    OnPush on_push = {};
    Wish wish = {};
  };

  // Before run(): says that shards(), the optimizer, and the units of a worker that holds() something, now have the
  // values of a run that was stopped after `step` steps; `order` is the result of order() then. With none, or one of
  // other workers or servers, every worker had made that many steps, and from then on the order is not known. Throws
  // Error (usage) where a record or a replay needs it.
  void go_on(int64_t step, const std::optional<PushLog>& order);
  // Runs until each worker has made `steps` steps, or all that there are, or a rank wants to stop; a replay may have to
  // run a little longer. Called by every rank, and again to continue. After the last step every rank's model has the
  // same last parameters. Throws the error of a failed rank; Error (not_finite) for a loss or gradient that is no
  // number.
  void run(int64_t steps, const Hooks& hooks);
  bool complete() const { return complete_; }
  // That all workers have made; in a replay, their mean.
  int64_t steps() const { return replays() ? replayed_ / axis_.size() : clock_; }
  // Every rank calls it, also of a run that was stopped: the record is written.
  AsyncSummary finish();

  // On rank 0 the order up to now, where all of it is known. Every rank calls it.
  std::optional<PushLog> order();
  // Whether a worker has pulled parameters for its next clock, which a stopped replay goes on with.
  bool holds(int worker) const;
  const std::vector<FlatUnit>& units() const { return units_; }    // this worker's
  const std::vector<FlatUnit>& shards() const { return shards_; }  // this server's; none on ranks that are no server
  // A worker's units on rank 0 (elsewhere undefined). Every rank calls it.
  Tensor gather_held(size_t unit, int worker);

  // The optimizer of this rank's server; null on ranks that are no server.
  Optimizer* optimizer() { return shard_ ? &shard_->optimizer() : nullptr; }
  // The whole on rank 0 of a tensor that is cut like a unit (see gather_unit()); undefined on ranks that are no
  // server.
  Tensor gather(size_t unit, const Tensor& shard);
  // Bytes of gradients and of parameters that this rank has sent to others.
  int64_t pushed_bytes() const { return pushed_; }
  int64_t pulled_bytes() const { return pulled_; }

 private:
  void check_options() const;
  void make_memory(const DataOptions& options);
  void read_replay();
  void make_shard();
  void connect();
  void go_on_in_replay(const std::optional<PushLog>& order);
  int64_t next_clock(int worker) const;
  bool has_pulled(size_t server, int worker) const;
  void play(int64_t target, const Hooks& hooks);
  // the worker: parallel/async/server.cpp
  void work(int64_t target, const Hooks& hooks);
  bool pull(int64_t before);
  bool fetch(int server);
  void push(int64_t clock, double loss);
  void push_to(int server, const AsyncMessage& message);
  void wish_to_stop();
  void end();
  void report(const OnPush& on_push);
  // the server beside it
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
  int64_t clock_ = 0;             // clocks that this worker has done
  int64_t before_ = 0;            // pushes of all workers that the order does not know
  int64_t staleness_before_ = 0;  // under which a part of the order was made
  int64_t fastest_ = 0;           // clocks of the fastest worker when the run was picked up
  bool complete_ = false;
  PushLog replay_;  // and its orders by server, and where it can be stopped; empty: no replay
  std::vector<PushOrder> orders_;
  std::vector<int64_t> places_;
  int64_t replayed_ = 0;               // pushes
  std::vector<FlatUnit> units_;        // the worker's, whole
  std::vector<FlatUnit> shards_;       // the server's own memory
  std::unique_ptr<AsyncShard> shard_;  // on servers
  std::vector<std::unique_ptr<AsyncChannel>>
      channels_;                   // by worker: this one's to its servers, the others' to this server
  std::vector<int64_t> versions_;  // version that was last pulled, by server
  std::vector<bool> fresh_;        // by server: whether that is for the next clock
  int64_t pushed_ = 0;
  std::atomic<int64_t> pulled_{0};
  size_t reported_ = 0;
  std::mutex stopping_;
  std::exception_ptr thrown_;  // the first failure on this rank
};

}  // namespace tessera
