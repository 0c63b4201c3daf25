// Communicator: the ranks of one mesh axis (or of the whole world), and what they do together.
//
//   world.all_reduce(gradients);                         // blocking, in place
//   Pending p = world.start_all_reduce(bucket);          // or in the background,
//   ... compute ...
//   p.wait();                                            // done here
//
// Every rank of a group must make the same calls in the same order; otherwise the error shows the call of each side.
// Calls and bytes sent are counted by operation. A group of one rank sends nothing and counts nothing. Tensors must be
// contiguous. Arrays that are cut over ranks are cut as piece() says, so pieces may be uneven.
//
// Arrays may lie on GPUs, on every rank or on none. Then a call queues its work on the stream of the rank's arena,
// behind earlier work, and the call (or wait()) returns when the work is queued. That stream may be captured as a CUDA
// graph (tensor/cuda/gpus.h; NCCL's ranks only). Then a start_...() begins at once, and the graph runs it beside the
// work that is queued until wait().
//
// Everything throws CommError that names rank, axis, operation and bytes when a rank fails, does not come within the
// timeout, or asks for something else. One thread at a time may use a communicator.
#pragma once
#include <future>

#include "parallel/comm/algorithms.h"
#include "parallel/comm/wait.h"
#include "tensor/tensor.h"

namespace tessera {

class Trace;
class CommWorker;

struct OpCount {
  int64_t calls = 0, sent = 0;  // sent: bytes that left this rank
  bool operator==(const OpCount&) const = default;
};
using OpCounts = std::array<OpCount, kOps>;

// A communication in the background. wait() returns when it is done, and throws what it threw; to be called before the
// tensors are used again. The tensors stay alive until then by themselves.
class [[nodiscard]] Work {
 public:
  Work() = default;  // nothing to wait for
  explicit Work(std::future<void> done, std::vector<Tensor> held = {}, StallTimer* held_up = nullptr)
      : done_(std::move(done)), held_(std::move(held)), held_up_(held_up) {}
  void wait() {
    const std::vector<Tensor> until_done = std::exchange(held_, {});
    const ScopedStall span(held_up_);
    if (done_.valid()) done_.get();
  }

 private:
  std::future<void> done_;
  std::vector<Tensor> held_;
  StallTimer* held_up_ = nullptr;
};

class Communicator : NotCopied {
 public:
  // `axis` is its name in messages and counts.
  Communicator(std::unique_ptr<Transport> transport, std::string axis, Algorithm algorithm = Algorithm::direct);
  ~Communicator();

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  const std::string& axis() const { return axis_; }
  int world_rank(int rank) const { return transport_->world_rank(rank); }
  int local_rank() const { return transport_->local_rank(); }  // among the world's ranks on this machine
  std::string_view kind() const { return transport_->kind(); }
  // An arena on the host in which the ranks reach each other's arrays, as far as they can: what lies there is exchanged
  // without copies.
  ArenaPtr make_arena() const { return transport_->maps_peers() ? make_shared_arena() : tessera::make_arena(); }
  // The algorithm of all_reduce, reduce_scatter and all_gather; it also gives the order of summation.
  Algorithm algorithm() const { return algorithm_; }
  void set_algorithm(Algorithm algorithm) { algorithm_ = algorithm; }

  // Sums (or largest values) over ranks, in place on every rank.
  void all_reduce(const Tensor& x, Reduction reduction = Reduction::sum);
  // out = this rank's piece of the sum of all ranks' `in`; out may lie in its place inside `in`, whose other pieces
  // stay.
  void reduce_scatter(const Tensor& in, const Tensor& out, Reduction reduction = Reduction::sum, int64_t rows = 1);
  // out = all ranks' pieces, of which `in` is this rank's; it may lie in its place inside `out`.
  void all_gather(const Tensor& in, const Tensor& out, int64_t rows = 1);
  // Whether these two may cut each of `rows` rows of the whole, evenly: where ranks read each other's arrays.
  bool supports_row_slices() const { return algorithm_ == Algorithm::direct && transport_->supports_row_slices(); }
  void broadcast(const Tensor& x, int root);
  // The sum in rank order goes to the root's `x`; other ranks keep theirs.
  void reduce(const Tensor& x, int root);
  // The whole (`out` of gather, `in` of scatter) is needed at the root only. Elsewhere it may be undefined when the
  // pieces are even, or a meta tensor.
  void gather(const Tensor& in, const Tensor& out, int root);
  void scatter(const Tensor& in, const Tensor& out, int root);
  // Piece r of `in` goes to rank r, which finds it as piece `rank` of its `out`. The size must be a multiple of the
  // ranks.
  void all_to_all(const Tensor& in, const Tensor& out);
  // Sends uneven pieces, as messages (on GPUs by the library, where there is one): sent[r] elements of `in` go to rank
  // r, and received[r] come from it, one rank's after another's. The other rank must expect as many elements as are
  // sent to it. Only bytes that leave the rank are counted.
  void all_to_all(const Tensor& in, const Tensor& out, std::span<const int64_t> sent,
                  std::span<const int64_t> received);
  // Point to point: send() copies and returns at once; messages of one tag arrive in order.
  void send(const Tensor& x, int to, int tag = 0);
  void recv(const Tensor& x, int from, int tag = 0);
  void barrier();

  Work start_all_reduce(const Tensor& x, Reduction reduction = Reduction::sum);
  Work start_reduce_scatter(const Tensor& in, const Tensor& out, int64_t rows = 1);
  Work start_all_gather(const Tensor& in, const Tensor& out, int64_t rows = 1);
  Work start_all_to_all(const Tensor& in, const Tensor& out, std::span<const int64_t> sent,
                        std::span<const int64_t> received);

  // For numbers that every rank needs: added in rank order, whatever the algorithm.
  double sum(double x);
  double max(double x);
  void sum(std::span<double> x);

  // The groups of ranks that give the same color, ranked by key, then by rank here. Every rank calls it.
  std::unique_ptr<Communicator> split(int color, int key, std::string axis);

  // The host waits for the arena's stream and what collectives are queued on it, of this and of all other groups of the
  // rank. Does not report what a kernel has found: cuda::synchronize() does.
  void wait_for_gpu(Arena& gpu, const std::string& during);

  // Since the communicator was made or the counts were reset.
  const OpCounts& counts() const { return counts_; }
  void reset_counts(const OpCounts& to = {}) { counts_ = to; }
  // For work that was queued once and is done again without a call (a launched graph).
  void count_again(const OpCounts& more);
  // Every communication from now on is noted there too (null: no more). The trace must outlive the communicator.
  void set_trace(Trace* trace) { trace_ = trace; }
  // Where it is added how long this rank's own thread is held up from now on (null: nowhere), also by groups that are
  // split from this one. It must outlive them.
  void set_held_up(StallTimer* held_up) { held_up_ = held_up; }

  // The same of a flight, also of waits, and of groups that are split from this one.
  void set_flight(std::shared_ptr<Flight> flight);
  const std::shared_ptr<Flight>& flight() const { return flight_; }

  Transport& transport() { return *transport_; }

 private:
  void run(const Call& call) { run(call, algorithm_); }
  void run(const Call& call, Algorithm algorithm);  // whoever calls it holds the tensors until it returns
  Work start(const Call& call, std::vector<Tensor> held) { return start(call, std::move(held), algorithm_); }
  // `pieces`: those of the call, which stay alive until it is done.
  Work start(const Call& call, std::vector<Tensor> held, Algorithm algorithm,
             std::shared_ptr<const UnevenSplits> pieces = nullptr);
  Work start_queued(const Call& call, std::vector<Tensor> held, Algorithm algorithm);
  void perform(const Call& call, Algorithm algorithm, double requested);
  template <class F>
  void observed(const Call& call, double requested, const F& f);
  double now() const;
  Call whole(Op op, const Tensor& x) const;
  Call cut(Op op, const Tensor& in, const Tensor& out, int64_t rows = 1) const;
  Call uneven(const Tensor& in, const Tensor& out, const UnevenSplits& pieces) const;
  bool alone(const Call& call) const;
  int checked(const Call& call, int rank) const;
  void over_ranks(std::span<double> x, Reduction reduction);
  [[noreturn]] void complain(const Call& call, const std::string& what) const;

  std::unique_ptr<Transport> transport_;
  std::string axis_;
  Algorithm algorithm_;
  OpCounts counts_{};
  Trace* trace_ = nullptr;
  StallTimer* held_up_ = nullptr;
  std::shared_ptr<Flight> flight_;
  int flight_axis_ = 0;
  std::shared_ptr<CommWorker> worker_;  // worker of the transport, or made by the first start_...()
  std::atomic<int> in_background_ = 0;  // communications that have started and not ended
};

// Ranks that are processes may have been started with other options, in other folders, with other programs. Before they
// work together they compare what must be the same.

// Names and values that a rank goes by, in any order.
using Facts = std::vector<std::pair<std::string, std::string>>;

// Every rank of `world` calls it. Throws Error (usage), the same on every rank, that names each fact which is not the
// same everywhere, with its value on rank 0 and on the first rank with another. Cost: one all_gather of 8 bytes where
// all agree, which is not counted.
void require_same(Communicator& world, const Facts& mine);

// A rank's text on every rank.
std::string broadcast_text(Communicator& world, const std::string& text, int root);

}  // namespace tessera
