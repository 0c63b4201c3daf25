// How the ranks of a data axis shard a model's units and reduce their gradients, as plain integers.
//
//   everywhere   [ all ] [ all ] [ all ] [ all ]     DDP
//   at_root      [ all ] [     ] [     ] [     ]     DataParallel
//   by_owners    [ a   ] [   b ] [     ] [     ]     parameter server, here with two servers
//   in_shards    [a    ] [ b   ] [  c  ] [   d0]     ZeRO; the last shard is padded with zeros
//                [a    ] [   b0] [a    ] [   b0]     hybrid, groups of two: gradients are reduced within a group, then
//                                                    between groups
//
// Shards begin at multiples of a norm block, so ranks can exchange the block sums of the gradient norm. Owners do not
// pad: the last owners have fewer elements or none, so the total bytes that owners store, receive and send do not
// depend on their number.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "autograd/ops.h"
#include "nn/parameter.h"
#include "parallel/comm/communicator.h"

namespace tessera {

// Which ranks store a unit's updated values and reduced gradients between two steps.
enum class ShardingKind { everywhere, at_root, by_owners, in_shards };

// One gradient reduction over ranks; ring and tree divide `count` into chunks.
struct ReductionSpan {
  Range range;        // elements of all gradients, concatenated by unit
  int64_t count = 0;  // elements of the collective, including trailing padding
};

struct DataLayout {
  ShardingKind sharding = ShardingKind::everywhere;
  int owners = 1;  // ranks that store a shard of each unit
  std::vector<int64_t> sizes = {};
  std::vector<ReductionSpan> reductions = {};
  bool every_microbatch = false;  // reduce after each micro-batch, not once per step
  // Replicas agree only after a synchronization; parameter deltas are reduced if all units are in one fragment.
  bool local_updates = false;
  std::vector<ReductionSpan> between = {};  // second reduction of a step, between shard groups; empty: one group
};

// Elements of an owner's shard; the last owners' shards may be shorter.
int64_t shard_size(int64_t size, int owners);
// Empty if `rank` is not an owner.
Range shard_range(int64_t size, int owners, int rank);
void check_servers(int servers, int ranks);

// Gathers a tensor laid out like a unit's values (optimizer moments, gradients) on rank 0; undefined on other ranks.
// Collective over the axis.
Tensor gather_unit(Communicator& axis, const DataLayout& layout, size_t unit, const Tensor& shard);

// In micro-batch j of m, rank r of n processes the sequences [(r m + j) b, (r m + j + 1) b) of the step's batch; with
// context parallelism r counts groups of `copies` ranks. If rank 0 reads for all ranks (DataParallel):
//
//   ids -- scatter --> forward --> logits -- gather --> loss at rank 0 -- scatter --> backward

struct BatchSlice {
  int64_t first = 0, count = 0;
};

// The root of a backward pass: a value, its gradient unless that is 1, and the loss that it represents.
struct Root {
  Var value;
  Tensor seed = {};
  DeviceScalar loss_sum = {};  // over this rank's target tokens
};

// Hidden states (B, T, C) -> logits (B T, V), for rank 0 of DataParallel, or, with targets int32 (B T), -> loss;
// `scale` as in cross_entropy() of autograd/ops.h.
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
  DataBatches(Communicator& axis, ArenaPtr arena, const Options& options);

  // The sequences that this rank processes. Throws Error (usage) if `batch` is not a multiple of ranks x micro-batches.
  BatchSlice computes(int64_t batch, int64_t microbatches, int64_t index) const;
  // The sequences that this rank reads from the data set, in order: all ranks', its own, or none.
  std::vector<BatchSlice> loads(int64_t batch, int64_t microbatches, int64_t index) const;
  // The sequences padded to one common length because they are sent together: this rank's, or all ranks'.
  std::vector<BatchSlice> moves(int64_t batch, int64_t microbatches, int64_t index) const;
  // This rank's slice of the loaded tokens, int32 (B, T). A rank that loads none passes a meta tensor of its slice's
  // shape.
  Tensor scatter_batch(const Tensor& ids) const;
  // `targets` were loaded like the ids: (B, T'), T' >= T because rows of several ranks are padded to the longest.
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
