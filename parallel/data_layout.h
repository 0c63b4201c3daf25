// How the ranks of a data axis share out the units of a model and sum their gradients, in plain numbers. From these
// follow the memory that a strategy needs, the gradient norm, the gathering of a unit, and the order that verify
// replays.
//
//   everywhere   [ all ] [ all ] [ all ] [ all ]     DDP
//   at_root      [ all ] [     ] [     ] [     ]     DataParallel
//   by_owners    [ a   ] [   b ] [     ] [     ]     a parameter server, here of two servers
//   in_shards    [a    ] [ b   ] [  c  ] [   d0]     ZeRO; the last shard is padded with zeros
//                [a    ] [   b0] [a    ] [   b0]     in groups of two: a parameter is cut over one group of ranks and
//                                                  summed over two, its group and then those with the same shard
//
// A unit is cut evenly, at multiples of a norm block, so that ranks can exchange the block sums of the gradient norm.
// Owners pad nothing. If they cannot share a unit evenly, the last ones keep less, or nothing. So the bytes that all
// owners together keep, receive and send do not depend on their number.
#pragma once

#include "autograd/ops.h"
#include "nn/parameter.h"
#include "parallel/comm/communicator.h"

namespace tessera {

// Which rank keeps which part of a unit between two steps: the values that its optimizer updates, and the sum of their
// gradients.
enum class ShardingKind { everywhere, at_root, by_owners, in_shards };

// One collective that sums gradients over ranks, and how it is cut: ring and tree depend on that.
struct ReductionSpan {
  Range range;        // elements of all gradients, units one after another (each of Module::Unit::size)
  int64_t count = 0;  // elements that the collective has, padding at the end included
};

struct DataLayout {
  ShardingKind kept = ShardingKind::everywhere;
  int owners = 1;                              // ranks that keep a part of each unit, where not all keep everything
  std::vector<int64_t> sizes = {};             // elements of each unit
  std::vector<ReductionSpan> reductions = {};  // in no particular order
  bool every_microbatch = false;               // they are made after each micro-batch of a step, not once
  // Ranks that keep everything train alone, and have the same values after some steps only; reductions are of the
  // differences of their values, where all units are in one fragment.
  bool apart = false;
  std::vector<ReductionSpan> between = {};  // second sum of a step, of shards over groups; empty: there is one group
};

// Elements that an owner keeps of a unit of `size`, but for the last ones.
int64_t shard_size(int64_t size, int owners);
// Those that rank `rank` keeps; none when it is no owner.
Range shard_range(int64_t size, int owners, int rank);
// Throws Error unless 1 <= servers <= ranks.
void check_servers(int servers, int ranks);

// The whole of a tensor that lies like a unit's values (an optimizer's moment, the gradient), on rank 0, undefined
// elsewhere: `shard` is this rank's part of it. Every rank calls it. Rank 0 receives the other parts.
Tensor gather_unit(Communicator& axis, const DataLayout& layout, size_t unit, const Tensor& shard);

// Which sequences of a step's batch a rank of the data axis reads, and which it computes; and how tokens, logits and
// losses move where rank 0 reads for all (DataParallel), as torch.nn.DataParallel does.
//
// Rank r of n, micro-batch j of m: sequences [(r m + j) b, (r m + j + 1) b) of the step's batch. Where `copies` ranks
// share each sequence (context parallelism), r counts groups of so many ranks.
//
//   through the root:   ids -- scatter --> forward --> logits -- gather --> loss at rank 0 -- scatter --> backward
//   volume              per micro-batch of b sequences of T tokens, V vocabulary, e bytes of a value, n ranks: rank 0
//                       sends (n - 1) (4 b T + 8 + e b T V) and receives (n - 1) e b T V; the 8 are a rank's loss

// Sequences [first, first + count) of the step's batch.
struct BatchSlice {
  int64_t first = 0, count = 0;
};

// The root of a backward pass: a value, its gradient when that is not one, and the loss that it stands for.
struct Root {
  Var value;
  Tensor seed = {};
  DeviceScalar loss_sum = {};  // over the target tokens that this rank computes
};

// The functions that follow a model's last hidden states (B, T, C): its logits (B T, V), for a rank 0 that needs them,
// and its loss, of targets int32 (B T), with `scale` as in cross_entropy() of autograd/ops.h.
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
  // `axis` must outlive it.
  DataBatches(Communicator& axis, ArenaPtr arena, const Options& options);

  // The sequences that this rank computes, forward and backward, in micro-batch `index` of a step. Throws Error
  // (usage) when `batch` is no multiple of ranks times micro-batches.
  BatchSlice computes(int64_t batch, int64_t microbatches, int64_t index) const;
  // Those that it reads from the data set for that, in this order: maybe those of all ranks, maybe none.
  std::vector<BatchSlice> loads(int64_t batch, int64_t microbatches, int64_t index) const;
  // Those whose tokens move together, so that their rows have one length on the way: its own, or those of all ranks.
  std::vector<BatchSlice> moves(int64_t batch, int64_t microbatches, int64_t index) const;
  // The part of the loaded tokens that this rank computes: int32 (B, T), one slice below the other. A rank that loads
  // none passes a meta tensor of the shape that it computes.
  Tensor scatter_batch(const Tensor& ids) const;
  // The loss of the hidden states, and where their backward pass begins. `targets` were loaded like the ids, (B, T') of
  // T' >= T tokens where those of several ranks are there, whose rows differ in length; `scale` is that of
  // cross_entropy().
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
