// Which sequences of a step's batch a rank of the data axis reads, and which it computes; and how tokens, logits and
// losses move where rank 0 reads for all (DataParallel), as torch.nn.DataParallel does.
//
// Rank r of n, micro-batch j of m: sequences [(r m + j) b, (r m + j + 1) b) of the step's batch. Where `copies` ranks
// share each sequence (context parallelism), r counts groups of so many ranks.
//
//   through the root:   ids -- scatter --> forward --> logits -- gather --> loss at rank 0 -- scatter --> backward
//   volume              per micro-batch of b sequences of T tokens, V vocabulary, e bytes of a value, n ranks: rank 0
//                       sends (n - 1) (4 b T + 8 + e b T V) and receives (n - 1) e b T V; the 8 are a rank's loss
#pragma once
#include <functional>
#include <vector>

#include "autograd/ops.h"
#include "parallel/comm/communicator.h"

namespace tessera {

// Sequences [first, first + count) of the step's batch.
struct BatchSlice {
  int64_t first = 0, count = 0;
};

// Where backward() begins: a value, its gradient when that is not one, and the loss that it stands for.
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
  // The part of the loaded tokens that this rank computes: int32 (B, T), one slice below the other. A rank that loads
  // none passes a meta tensor of the shape that it computes.
  Tensor scatter_batch(const Tensor& ids) const;
  // The loss of the hidden states, and where their backward pass begins. `targets` were loaded like the ids; `scale` is
  // that of cross_entropy().
  Root loss(const Var& hidden, const Tensor& targets, double scale, const Head& head) const;

 private:
  struct RootLoss;
  BatchSlice slice_of(int rank, int64_t batch, int64_t microbatches, int64_t index) const;
  Tensor gather_logits(const Tensor& own) const;
  RootLoss losses_at_root(Tensor logits, const Tensor& targets, double scale) const;
  bool root() const { return axis_.rank() == 0; }

  Communicator& axis_;
  ArenaPtr arena_;
  Options options_;
};

}  // namespace tessera
