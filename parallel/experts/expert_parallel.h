// Expert parallelism: the ranks of an axis, a subdivision of the data axis, shard the experts of each layer, and tokens
// are dispatched to them (Lepikhin et al. 2020, "GShard"; Fedus et al. 2021, "Switch transformers").
//
//   rank 0: its tokens  [to 0 1 | to 2 3] --.    .--> rank 0: experts 0 1   rows of rank 0, then rows of rank 1
//                                             \  /
//                                              ><          first the row counts per expert, then the rows
//                                             /  \.
//   rank 1: its tokens  [to 0 1 | to 2 3] --'    '--> rank 1: experts 2 3   rows of rank 0, then rows of rank 1
//
// placements     each expert is on one rank of the axis, its gradients summed over the ranks of the data axis that have
//                it; everything else as without the axis
// memory/rank    1 / e of the experts' parameters, gradients and state
// volume/rank    per layer and micro-batch: (e - 1) / e E integers of 8 bytes, and for each choice whose expert is on
//                another rank 4 rows of C values (dispatch and combine, forward and backward), or 6 with recomputation
//
// A shared expert is computed while rows are sent to the experts; its backward pass overlaps with the return of the
// rows' gradients.
//
// An expert's gradient is computed separately for the rows of each rank and accumulated in rank order, so the sharding
// of experts affects the result only through the order in which groups of ranks are added.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "nn/experts/experts.h"
#include "parallel/context_parallel.h"
#include "parallel/placement.h"

namespace tessera {

// Rank r of n gets experts [r E / n, (r + 1) E / n); throws Error unless n divides E. `ep` must outlive the layer; its
// ranks must run the same passes.
void shard_experts(MixtureOfExperts& layer, Communicator& ep);

// Shards every expert over tp like a feed-forward layer (parallel/tensor_parallel.h); all ranks route all tokens:
//
//   x between --f--> R --dispatch--> experts' rows, hidden 0..n of each --combine--> P --g--> between
//   x between --router--> logits, I --route--> weights --f--> R
//
// Volume in addition to a feed-forward layer's, per micro-batch of N tokens: backward an all-reduce of the N k weights'
// gradients; with S(1) also an all-gather of the logits and a reduction of the router's gradient. Experts save their
// full input, so the backward pass gathers nothing. Throws Error (usage) like colwise().
void cut_experts(MixtureOfExperts& layer, Communicator& tp, Placement between);
// For ranks of cp with the tokens at context_positions() of every sequence. The balance loss counts the choices on all
// ranks: an all-reduce of one value per sequence and expert. A capacity applies to full sequences and uses
// earlier_choices().
void count_over(MixtureOfExperts& layer, Communicator& cp, SequencePartition balance);

// Sends rows of x (R, C): the first sent[0] to rank 0, and so on; received[r] arrive from rank r. The gradient takes
// the reverse path.
Var exchange_rows(const Var& x, Communicator& axis, const std::vector<int64_t>& sent,
                  const std::vector<int64_t>& received);

// exchange_rows() in the background:
//
//   forward    start_rows(x) --- computation between --- rows()        the rows are in transit
//   backward   wait for the gradients <--- its backward pass --- send the gradients
//
// Nodes created between the two calls also overlap in the backward pass, which runs nodes from the newest to the
// oldest.

// `sent` and `received` count elements per rank.
struct RowArrays {
  RowArrays(const Tensor& x, const std::vector<int64_t>& rows_sent, const std::vector<int64_t>& rows_received);
  Tensor in, out;
  std::vector<int64_t> sent, received;
};

// Returns a function that waits for the result; call it once. Collective; `axis` must outlive the graph.
std::function<Var()> start_rows(const Var& x, Communicator& axis, const std::vector<int64_t>& sent,
                                const std::vector<int64_t>& received);

// Choices that fit into the capacity if ranks have slices of the same sequences: the same as with the full sequence on
// one rank. An expert accepts all tokens' first choices, then the second choices, in token order across ranks:
//
//   zig-zag, c = 2: tokens   0 1 | 2 3 | 4 5 | 6 7      rank 0 has 0 1 6 7, rank 1 has 2 3 4 5
//   round 1                  1 2   3 4   5 6   7 8
//   round 2                  9 ...
//
// The numbers are the order in which an expert's slots are assigned. A choice gets a slot if fewer choices of the same
// expert than the capacity precede it.
//
// volume/rank  (c - 1) / c of 4 bytes for each choice of all tokens, per layer and micro-batch

// chosen int32 (N, k), of this rank's tokens in the order of context_positions() -> int32 (N, k) on the host: the
// number of earlier choices of the same expert in the full sequence. Collective over `cp`.
Tensor earlier_choices(const Tensor& chosen, int64_t sequences, int64_t experts, Communicator& cp,
                       SequencePartition balance);

}  // namespace tessera
