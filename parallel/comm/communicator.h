// Communicator: the ranks of one mesh axis (or the world), and their collectives.
//
//   world.all_reduce(gradients);                      // blocking, in place
//   Work work = world.start_all_reduce(bucket);       // in the background
//   ... compute ...
//   work.wait();                                      // complete here
//
// All ranks of a group must make the same calls in the same order; a mismatch throws. Tensors must be contiguous and
// are split over ranks by chunk_range(), so chunks may be uneven. Calls and bytes sent are counted by operation; a
// group of one rank counts nothing.
//
// Tensors are on GPUs on every rank or on none. On GPUs a call (or wait()) returns when its work is queued on the
// stream of the rank's arena. While that stream is captured as a CUDA graph (NCCL only), a start_...() begins
// immediately, and the graph runs it concurrently with the work queued until wait().
//
// All functions throw CommError with rank, axis, operation and bytes if a rank fails, times out, or requests a
// different operation. A communicator may be used by one thread at a time.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/wait.h"
#include "tensor/tensor.h"

namespace tessera {

class Trace;
class CommWorker;

struct OpCount {
  int64_t calls = 0, sent = 0;
  bool operator==(const OpCount&) const = default;
};
using OpCounts = std::array<OpCount, kOps>;

// wait() returns when the communication is complete and rethrows its errors; call it before using the tensors again.
// Work keeps the tensors alive until then.
class [[nodiscard]] Work {
 public:
  Work() = default;
  explicit Work(std::future<void> done, std::vector<Tensor> held = {}, StallTimer* stall_timer = nullptr)
      : done_(std::move(done)), held_(std::move(held)), stall_timer_(stall_timer) {}
  void wait() {
    const std::vector<Tensor> until_done = std::exchange(held_, {});
    const ScopedStall span(stall_timer_);
    if (done_.valid()) done_.get();
  }

 private:
  std::future<void> done_;
  std::vector<Tensor> held_;
  StallTimer* stall_timer_ = nullptr;
};

class Communicator : NotCopied {
 public:
  Communicator(std::unique_ptr<Transport> transport, std::string axis, Algorithm algorithm = Algorithm::direct);
  ~Communicator();

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  const std::string& axis() const { return axis_; }
  int world_rank(int rank) const { return transport_->world_rank(rank); }
  int local_rank() const { return transport_->local_rank(); }
  std::string_view kind() const { return transport_->kind(); }
  // A host arena whose arrays the ranks exchange without copies, if the transport can map peers' memory.
  ArenaPtr make_arena() const { return transport_->maps_peers() ? make_shared_arena() : tessera::make_arena(); }
  // For all_reduce, reduce_scatter and all_gather; determines the summation order.
  Algorithm algorithm() const { return algorithm_; }
  void set_algorithm(Algorithm algorithm) { algorithm_ = algorithm; }
  // From now on all_reduce and reduce_scatter add tensors in pairs (Reduction::pair_sum), with the direct algorithm.
  void add_in_pairs() {
    algorithm_ = Algorithm::direct;
    adds_in_pairs_ = true;
  }
  bool adds_in_pairs() const { return adds_in_pairs_; }

  void all_reduce(const Tensor& x, Reduction reduction = Reduction::sum);
  // out = this rank's chunk of the reduced `in`; it may be the chunk inside `in`, whose other chunks are not modified.
  void reduce_scatter(const Tensor& in, const Tensor& out, Reduction reduction = Reduction::sum, int64_t rows = 1);
  // out = the chunks `in` of all ranks; `in` may be this rank's chunk inside `out`.
  void all_gather(const Tensor& in, const Tensor& out, int64_t rows = 1);
  // Whether reduce_scatter and all_gather support rows > 1, splitting each row evenly.
  bool supports_row_slices() const { return algorithm_ == Algorithm::direct && transport_->supports_row_slices(); }
  void broadcast(const Tensor& x, int root);
  // Reduces in rank order into the root's `x`; other ranks' `x` is unchanged.
  void reduce(const Tensor& x, int root);
  // The full array (`out` of gather, `in` of scatter) is needed only at the root. On other ranks it may be a meta
  // tensor, or undefined if the chunks are even.
  void gather(const Tensor& in, const Tensor& out, int root);
  void scatter(const Tensor& in, const Tensor& out, int root);
  // Chunk r of `in` becomes chunk `rank` of rank r's `out`. The size must be a multiple of the number of ranks.
  void all_to_all(const Tensor& in, const Tensor& out);
  // Uneven chunks, sent as messages (on GPUs by the library, if available): sent[r] elements of `in` to rank r and
  // received[r] from rank r, in rank order. Only bytes that leave the rank are counted.
  void all_to_all(const Tensor& in, const Tensor& out, std::span<const int64_t> sent,
                  std::span<const int64_t> received);
  // send() copies and returns immediately; messages with equal tags arrive in order.
  void send(const Tensor& x, int to, int tag = 0);
  void recv(const Tensor& x, int from, int tag = 0);
  void barrier();

  Work start_all_reduce(const Tensor& x, Reduction reduction = Reduction::sum);
  Work start_reduce_scatter(const Tensor& in, const Tensor& out, int64_t rows = 1);
  Work start_all_gather(const Tensor& in, const Tensor& out, int64_t rows = 1);
  Work start_all_to_all(const Tensor& in, const Tensor& out, std::span<const int64_t> sent,
                        std::span<const int64_t> received);

  // For scalars; added in rank order with every algorithm.
  double sum(double x);
  double max(double x);
  void sum(std::span<double> x) { reduce_values(x, Reduction::sum); }

  // The ranks with equal color, ordered by key, then by rank. Collective.
  std::unique_ptr<Communicator> split(int color, int key, std::string axis);

  // Blocks the host until the arena's stream and the rank's queued collectives are complete. Kernel errors are reported
  // only by cuda::synchronize().
  void wait_for_gpu(Arena& gpu, const std::string& during);

  const OpCounts& counts() const { return counts_; }
  void reset_counts(const OpCounts& to = {}) { counts_ = to; }
  // Counts communications that are repeated without a call (by a graph launch).
  void count_again(const OpCounts& more);
  // Null: off. The trace must outlive the communicator.
  void set_trace(Trace* trace) { trace_ = trace; }
  // Accumulates the stall time of this rank's own thread (null: off), also for groups split later, which the timer must
  // outlive.
  void set_stall_timer(StallTimer* stall_timer) { stall_timer_ = stall_timer; }

  // Also applies to groups split from this one.
  void set_flight(std::shared_ptr<Flight> flight);
  const std::shared_ptr<Flight>& flight() const { return flight_; }

  Transport& transport() { return *transport_; }

 private:
  void run(const Call& call) { run(call, algorithm_); }
  void run(const Call& call, Algorithm algorithm);
  Work start(const Call& call, std::vector<Tensor> held) { return start(call, std::move(held), algorithm_); }
  Work start(const Call& call, std::vector<Tensor> held, Algorithm algorithm,
             std::shared_ptr<const UnevenSplits> splits = nullptr);
  Work start_queued(const Call& call, std::vector<Tensor> held, Algorithm algorithm);
  void perform(const Call& call, Algorithm algorithm, double requested);
  template <class F>
  int64_t named(const F& f) const;
  template <class F>
  void pass_message(Op op, const Tensor& x, int peer, const char* direction, const F& f);
  template <class F>
  void observed(const Call& call, double requested, const F& f);
  double now() const;
  Reduction ordered(Reduction reduction) const;
  Call full_call(Op op, const Tensor& x) const;
  Call sharded_call(Op op, const Tensor& in, const Tensor& out, int64_t rows = 1) const;
  Call uneven_call(const Tensor& in, const Tensor& out, const UnevenSplits& splits) const;
  bool copies_locally(const Call& call) const;
  int checked_rank(const Call& call, int rank) const;
  void reduce_values(std::span<double> x, Reduction reduction);
  [[noreturn]] void complain(const Call& call, const std::string& what) const;

  std::unique_ptr<Transport> transport_;
  std::string axis_;
  Algorithm algorithm_;
  bool adds_in_pairs_ = false;
  OpCounts counts_{};
  Trace* trace_ = nullptr;
  StallTimer* stall_timer_ = nullptr;
  std::shared_ptr<Flight> flight_;
  int flight_axis_ = 0;
  std::shared_ptr<CommWorker> worker_;  // the transport's, or created by the first start_...()
  std::atomic<int> in_background_ = 0;
};

using Facts = std::vector<std::pair<std::string, std::string>>;

// Compares facts that must be equal although processes may have different options or programs. Collective. Throws Error
// (usage), the same on every rank, that lists each differing fact with its value on rank 0 and on the first rank that
// differs. Cost: one all_gather of 8 bytes if all agree, which is not counted.
void require_same(Communicator& world, const Facts& mine);

std::string broadcast_text(Communicator& world, const std::string& text, int root);

// The values of all ranks, in rank order; every rank has the same number.
template <class T>
std::vector<T> all_gather_values(Communicator& group, const std::vector<T>& mine, const ArenaPtr& host = make_arena()) {
  const Tensor own = Tensor::of<T>(mine, {std::ssize(mine)}, host);
  const Tensor all = Tensor::empty({group.size() * own.numel()}, own.dtype(), host);
  group.all_gather(own, all);
  return all.to_vector<T>();
}

// "rank 2" or "ranks 2, 3".
std::string ranks_text(const std::set<int>& ranks);

}  // namespace tessera
