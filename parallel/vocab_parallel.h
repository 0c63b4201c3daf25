// Vocabulary parallelism: the embedding's table is cut by entries, and so are the logits, the largest tensor of a step,
// which are never put together (Shoeybi et al. 2019, section 3). Pieces need not be equal.
//
//   table   rank 0  entries 0 .. k     lookup   rows of the ids in it, zeros elsewhere    P -> between
//           rank 1  entries k .. V     head     logits (N, V_r) = x table^T               between -> R, then S(V)
//
//   loss of row i    m = max over ranks      s = sum over ranks of sum_j exp(x_ij - m)      log s + m - x_i,target
//
// placements     table S(0); logits and their gradient S(1) of (N, V)
// volume         lookup: one all-reduce of e B T C bytes (its gradient needs none); head: one for the gradient of its
//                input; loss: three all-reduces of N numbers (float32, or float64 for float64): the maximum, which is
//                no placement, the sum of exponentials, and the logit of the target. Between S(1) as in
//                tensor_parallel.h: reduce-scatter forward and all-gather backward of the lookup; the head gathers its
//                input, and again in its backward pass
#pragma once
#include "parallel/tensor_parallel.h"

namespace tessera {

// The table, its lookup, its transposed use and its loss, before there is memory. A tied head is the same table. Throws
// Error (usage) when there are fewer entries than ranks; a lookup throws for an id outside the whole vocabulary, and
// when the ranks do not divide the tokens of S(1).
void vocab_wise(Embedding& e, Communicator& tp, Placement between);

// ids int32 (...), table (V_r, C), which is this rank's piece of `vocab` entries -> (..., C) in P.
Var vocab_parallel_embedding(const Tensor& ids, const Var& table, const Communicator& tp, int64_t vocab);

// cross_entropy() of logits that are cut: each rank has its piece of the `vocab` columns, (N, V_r); targets int32 (N).
// The loss is the same on every rank, and so are errors. On one rank it is cross_entropy().
Loss vocab_parallel_cross_entropy(Var logits, const Tensor& targets, double scale, Communicator& tp, int64_t vocab);

}  // namespace tessera
