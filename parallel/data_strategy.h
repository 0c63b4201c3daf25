// What the strategies of the data axis have in common, as the training loop sees them.
//
//   for each step:
//     strategy.begin_step();
//     for each micro-batch j:
//       load the sequences of strategy.loads(...); the model's first sequence is that of strategy.computes(...)
//       root = strategy.loss(hidden states of strategy.deal(ids), targets, scale, head);
//       strategy.begin_gradients(j);
//       backward(root.value, {.seed = root.seed});
//       strategy.end_gradients(j);
//     strategy.finish_gradients();                   // shards() hold the gradient of the global batch
//     strategy.unit_sums(...);                       // for the gradient norm: the same bits on every rank
//     optimizer over strategy.shards() steps
//     strategy.share_parameters();                   // every rank has what it needs for the next step
//
// In a pipeline a rank has some of the units, and the passes of its stages alternate: then begin_gradients() and
// end_gradients() stand around what brings the gradients of one stage's units.
//
// The loss is divided once, by the target tokens of the global batch, so gradients of ranks and micro-batches add up
// without a division here. Rank r of n, micro-batch j of m: sequences [(r m + j) b, (r m + j + 1) b) of the step's
// batch. Where `copies` ranks share each sequence (context parallelism), r counts groups of so many ranks.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "autograd/ops.h"
#include "nn/flat.h"
#include "nn/module.h"
#include "parallel/comm/communicator.h"

namespace tessera {

struct DataOptions {
  std::string mode = "ddp";                 // or "dataparallel", "ps-sync"
  int servers = 1;                          // of a parameter server: they live on the first ranks
  int zero = 0;                             // stage of ZeRO; 0 for none
  int64_t microbatches = 1;                 // per step and rank
  int copies = 1;                           // ranks of the axis that have the same sequences, next to each other
  int64_t bucket_bytes = int64_t{4} << 20;  // of DDP's all-reduces
  DType dtype = DType::float32;             // of parameters
  DType grad_dtype = DType::float32;        // of accumulation and on the wire
  uint64_t seed = 0;                        // of the first parameters
};

// One collective that sums gradients over ranks, and how it is cut: ring and tree depend on that.
struct Reduced {
  Range range;        // elements of all gradients, units one after another (each of Module::Unit::size)
  int64_t count = 0;  // elements that the collective has, padding at the end included
};

// Sequences [first, first + count) of the step's batch.
struct Share {
  int64_t first = 0, count = 0;
};

// Where backward() begins: a value, its gradient when that is not one, and the loss that it stands for.
struct Root {
  Var value;
  Tensor seed = {};
  LateNumber loss_sum = {};  // over the target tokens that this rank computes
};

// What follows a model's last hidden states (B, T, C): its logits (B T, V), for a strategy that needs them, and its
// loss, of targets int32 (B T), with `scale` as in cross_entropy() of autograd/ops.h.
using LossFunction = std::function<Loss(const Var& hidden, const Tensor& targets, double scale)>;
struct Head {
  std::function<Var(const Var& hidden)> logits;
  LossFunction loss;
};

// Units of Module::layout(), by number.
struct UnitRange {
  size_t begin = 0, end = SIZE_MAX;
};

class DataStrategy {
 public:
  DataStrategy(const Communicator& axis, const DataOptions& options)
      : rank_(axis.rank() / options.copies), ranks_(axis.size() / options.copies) {}
  virtual ~DataStrategy() = default;
  DataStrategy(const DataStrategy&) = delete;
  DataStrategy& operator=(const DataStrategy&) = delete;

  virtual std::string_view name() const = 0;

  // The sequences of which this rank makes the forward and backward pass in micro-batch `index` of a step. Throws Error
  // (usage) when `batch` is no multiple of ranks times micro-batches.
  virtual Share computes(int64_t batch, int64_t microbatches, int64_t index) const;
  // Those that it reads from the data set for that, in this order: maybe those of all ranks, maybe none.
  virtual std::vector<Share> loads(int64_t batch, int64_t microbatches, int64_t index) const;
  // What this rank computes of what was loaded: int32 (B, T), one share below the other; a rank that loads none gives a
  // meta tensor of the shape that it computes.
  virtual Tensor deal(const Tensor& ids) { return ids; }
  // The loss of the hidden states, and where their backward pass begins. `targets` were loaded like the ids; `scale` is
  // that of cross_entropy().
  virtual Root loss(const Var& hidden, const Tensor& targets, double scale, const Head& head);

  // The values and gradients that this rank's optimizer updates; they stay where they are.
  virtual const std::vector<FlatUnit>& shards() const = 0;
  // The values that this rank holds between steps, whole or in part: what a checkpoint is read into.
  virtual std::vector<FlatUnit> residents() const { return shards(); }
  virtual void begin_step() = 0;
  virtual void begin_gradients(int64_t /*microbatch*/, UnitRange /*units*/ = {}) {}
  virtual void end_gradients(int64_t /*microbatch*/, UnitRange /*units*/ = {}) {}
  virtual void finish_gradients() = 0;
  // The sum of squares of each unit's gradient, in the order of optim/grad_norm.h; the same bits on every rank.
  virtual std::vector<double> unit_sums() = 0;
  // The same, in another order, of the slots that `counts` says.
  std::vector<double> unit_sums(const std::function<bool(const Slot&)>& counts);
  // Both left on the GPU, float64 (units), where nobody waits for them. The second is of this rank's shards alone:
  // the ranks that share the gradients out have to be added up.
  virtual Tensor unit_sums_on_gpu();
  Tensor own_sums_on_gpu(const std::function<bool(const Slot&)>& counts);
  virtual bool shares_out_gradients() const { return false; }  // or every rank has all of each unit's
  virtual void share_parameters() = 0;

  // Where a tensor like a shard (an optimizer's moment, the gradient, the values) lies as a whole: the elements
  // [0, unit size) of unit `u`, gathered onto rank 0, undefined elsewhere. Every rank calls it.
  virtual Tensor gather(size_t unit, const Tensor& shard) = 0;
  // The part of a whole unit that this rank keeps.
  virtual Range kept(size_t unit) const = 0;
  // How the gradients are cut for summing over ranks; how often a step sums: once, or after every micro-batch.
  virtual std::vector<Reduced> reductions() const = 0;
  virtual bool reduces_every_microbatch() const { return false; }

 protected:
  Share share_of(int rank, int64_t batch, int64_t microbatches, int64_t index) const;

 private:
  struct Parts {
    std::vector<Tensor> tensors;
    std::vector<int64_t> of_unit;  // how many of them each unit has
  };
  Parts parts_of_shards(const std::function<bool(const Slot&)>& counts) const;
  // Sums over ranks of numbers that each rank has a part of.
  virtual void add_parts(std::span<double> sums) = 0;
  int rank_, ranks_;
};

// DDP, a stage of ZeRO, DataParallel or a parameter server for the model's parameters, which get their memory and their
// first values here. `model` and `axis` must outlive it. Throws Error (usage) for an unknown mode and for what a mode
// cannot do.
std::unique_ptr<DataStrategy> make_data_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                                 const DataOptions& options);

}  // namespace tessera
