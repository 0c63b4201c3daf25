// How the ranks of a data axis shard the units of a model and reduce their gradients, as plain integers. The memory of
// a strategy, the gradient norm, the gathering of a unit, and the order that verify replays follow from it.
//
//   everywhere   [ all ] [ all ] [ all ] [ all ]     DDP
//   at_root      [ all ] [     ] [     ] [     ]     DataParallel
//   by_owners    [ a   ] [   b ] [     ] [     ]     parameter server, here with two servers
//   in_shards    [a    ] [ b   ] [  c  ] [   d0]     ZeRO; the last shard is padded with zeros
//                [a    ] [   b0] [a    ] [   b0]     hybrid, groups of two: parameters are sharded within a group;
//                                                    gradients are reduced within it, then between groups
//
// Shards begin at multiples of a norm block, so ranks can exchange the block sums of the gradient norm. Owners do not
// pad: if a unit is not divisible, the last ones have fewer elements or none, so the total bytes that owners store,
// receive and send do not depend on their number.
#pragma once

#include "autograd/ops.h"
#include "nn/parameter.h"
#include "parallel/comm/communicator.h"

namespace tessera {

// Which ranks store a unit between two steps: the values that the optimizer updates, and their reduced gradients.
enum class ShardingKind { everywhere, at_root, by_owners, in_shards };

// One gradient reduction over ranks, and its extent: ring and tree chunk by it.
struct ReductionSpan {
  Range range;        // elements of all gradients, units one after another (each of Module::Unit::size)
  int64_t count = 0;  // elements of the collective, including padding at the end
};

struct DataLayout {
  ShardingKind sharding = ShardingKind::everywhere;
  int owners = 1;  // ranks that store a shard of each unit, unless all store everything
  std::vector<int64_t> sizes = {};
  std::vector<ReductionSpan> reductions = {};
  bool every_microbatch = false;  // reductions run after each micro-batch, not once per step
  // Replicas with local updates, whose values agree only after some steps; reductions are of the differences of their
  // values, if all units are in one fragment.
  bool local_updates = false;
  std::vector<ReductionSpan> between = {};  // second reduction of a step, between shard groups; empty: one group
};

// Elements of an owner's shard of a unit of `size`; the last ones may be shorter.
int64_t shard_size(int64_t size, int owners);
// The shard of rank `rank`; empty if it is not an owner.
Range shard_range(int64_t size, int owners, int rank);
void check_servers(int servers, int ranks);

// The full tensor on rank 0 (undefined elsewhere) of a tensor laid out like a unit's values (optimizer moments,
// gradients); `shard` is this rank's shard. Collective over the axis.
Tensor gather_unit(Communicator& axis, const DataLayout& layout, size_t unit, const Tensor& shard);

// Which sequences of a step's batch a rank of the data axis reads and which it computes; and how tokens, logits and
// losses move if rank 0 reads for all ranks (DataParallel), as in torch.nn.DataParallel.
//
// Rank r of n, micro-batch j of m: sequences [(r m + j) b, (r m + j + 1) b) of the step's batch. If `copies` ranks
// share each sequence (context parallelism), r counts groups of that size.
//
//   through the root:   ids -- scatter --> forward --> logits -- gather --> loss at rank 0 -- scatter --> backward
//   volume              per micro-batch of b sequences of T tokens, V vocabulary, e bytes per value, n ranks: rank 0
//                       sends (n - 1) (4 b T + 8 + e b T V) and receives (n - 1) e b T V; the 8 are a rank's loss

// Sequences [first, first + count) of the step's batch.
struct BatchSlice {
  int64_t first = 0, count = 0;
};

// The root of a backward pass: a value, its gradient unless that is 1, and the loss that it represents.
struct Root {
  Var value;
  Tensor seed = {};
  DeviceScalar loss_sum = {};  // over this rank's target tokens
};

// The head of a model: hidden states (B, T, C) -> logits (B T, V), needed by rank 0 of DataParallel, or -> the loss of
// targets int32 (B T), with `scale` as in cross_entropy() of autograd/ops.h.
using LossFunction = std::function<Loss(const Var& hidden, const Tensor& targets, double scale)>;
struct Head {
  std::function<Var(const Var& hidden)> logits;
  LossFunction loss;
};

class DataBatches {
 public:
  struct Options {
    int copies = 1;
    bool through_root = false;
  };
  // `axis` must outlive this object.
  DataBatches(Communicator& axis, ArenaPtr arena, const Options& options);

  // The sequences that this rank computes in micro-batch `index` of a step. Throws Error (usage) if `batch` is not a
  // multiple of ranks x micro-batches.
  BatchSlice computes(int64_t batch, int64_t microbatches, int64_t index) const;
  // The sequences that it reads from the data set for that, in order: those of all ranks, its own, or none.
  std::vector<BatchSlice> loads(int64_t batch, int64_t microbatches, int64_t index) const;
  // The sequences whose rows have one common length because they move together: its own, or those of all ranks.
  std::vector<BatchSlice> moves(int64_t batch, int64_t microbatches, int64_t index) const;
  // This rank's slice of the loaded tokens: int32 (B, T), slices stacked along B. A rank that loads none passes a meta
  // tensor of the shape that it computes.
  Tensor scatter_batch(const Tensor& ids) const;
  // The loss of the hidden states and the root of their backward pass. `targets` were loaded like the ids: (B, T'), T'
  // >= T because rows of several ranks are padded to the longest; `scale` as in cross_entropy().
  Root loss(const Var& hidden, const Tensor& targets, double scale, const Head& head) const;

 private:
  struct RootLoss;
  BatchSlice batch_slice(int rank, int64_t batch, int64_t microbatches, int64_t index) const;
  Tensor gather_logits(const Tensor& own) const;
  RootLoss losses_at_root(Tensor logits, const Tensor& targets, double scale) const;
  bool root() const { return axis_.rank() == 0; }

  Communicator& axis_;
  ArenaPtr arena_;
  Options options_;
};

}  // namespace tessera
