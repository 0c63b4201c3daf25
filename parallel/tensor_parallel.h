// Tensor parallelism: weights are sharded in column/row pairs, so inner activations are never gathered (Shoeybi et al.
// 2019, "Megatron-LM", section 3). Sequence parallelism also shards the activations between the pairs over the tokens,
// so nothing in the layer is replicated (Korthikanti et al. 2022, "Reducing activation recomputation in large
// transformer models", section 4.2). The ranks must divide the heads and, with S(1), the tokens.
//
//            x between     colwise            local only             rowwise            x between
//   rank 0   [ I or S ] -> [ W1 rows 0.. ] -> heads, hidden 0..   -> [ W2 columns 0.. ] -> P -> [ I or S ]
//   rank 1   [ I or S ] -> [ W1 rows ..n ] -> heads, hidden ..n   -> [ W2 columns ..n ] -> P -> [ I or S ]
//                       f                                                               g
//
//                          between = I (tensor parallel)           between = S(1) (with sequence parallelism)
//   colwise weight, bias   S(0), S(0); a fused [q | k | v] by segments, so every rank has its heads of each
//   rowwise weight, bias   S(1), I                                 S(1), I treated as R
//   norms                  I                                       I treated as R
//   f: between -> R        forward -, backward all-reduce          forward all-gather, backward reduce-scatter
//   g: P -> between        forward all-reduce, backward -          forward reduce-scatter, backward all-gather
//   norms, dropout         all tokens on every rank                a rank's own tokens
//
// Volume per layer and micro-batch, with N = e B T C bytes: 2 all-reduces of N forward and 2 backward. With S(1) each
// becomes a reduce-scatter and an all-gather; the backward pass adds 2 all-gathers, because column layers save only the
// shard of their input, and 6 all-reduces of C elements (float32 under bfloat16) for two norms and two row biases.
//
// The backward pass of a column layer reduces the input gradient while it computes the weight gradient, and with S(1)
// gathers the input while it computes the input gradient:
//
//   this rank     dx = dy W             dW = dy^T x
//   background    [ gather x ]          [ reduce dx ]
//
// With DeferredWeightGrads the reduction completes immediately, a gathered input is retained until dW is computed, and
// the gradient of a row bias is reduced when it is computed, so all ranks must run deferred work in the same order.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "nn/layers.h"
#include "parallel/placement.h"

namespace tessera {

// Call these functions before the module is allocated; they do nothing on an axis of size 1. `tp` must outlive the
// module. `in`, `out` and `between` are I or S(dim of the tokens).

// Shards the outputs, each of `segments` (sizes; empty: one segment) separately. Throws Error (usage) if a segment has
// fewer rows than there are ranks.
void colwise(Linear& l, Communicator& tp, Placement in, const std::vector<int64_t>& segments = {});
// Shards the inputs. The bias is added once, after the reduction; the layer must not have an activation.
void rowwise(Linear& l, Communicator& tp, Placement out);
// For a module that processes each token independently (a norm).
void token_wise(Module& module, Communicator& tp, Placement between);
// Samples masks for this rank's tokens; in training, StepInfo must set tokens_total or positions.
void token_wise(Dropout& dropout, Communicator& tp, Placement between);
// Shards q, k, v and the output projection over heads, with their dropout. A per-head norm reduces its gradient over
// the ranks. Throws Error (usage) if the ranks do not divide both head counts.
void head_wise(Attention& attention, Communicator& tp, Placement between);

void shard_parameter(Module& module, const Var& parameter, int dim, const Communicator& tp,
                     const std::vector<int64_t>& segments = {});
std::shared_ptr<const SharedInput> column_input(Communicator& tp, Placement in);
// P -> between. Throws Error (usage) if the ranks do not divide the tokens.
Var join(Var partial, Communicator& tp, Placement between);

// Vocabulary parallelism: the embedding table and the logits, the largest tensor of a step, are sharded over the
// vocabulary and never gathered (Shoeybi et al. 2019, section 3). Shards may be unequal.
//
//   table   rank 0  entries 0 .. k     lookup   rows of the ids in it, zeros elsewhere    P -> between
//           rank 1  entries k .. V     head     logits (N, V_r) = x table^T               between -> R, then S(V)
//
//   loss of row i    m = max over ranks      s = sum over ranks of sum_j exp(x_ij - m)      log s + m - x_i,target
//
// placements     table S(0); logits and their gradient S(1) of (N, V)
// volume         lookup: one all-reduce of e B T C bytes (none backward); head: one for the gradient of its input;
//                loss: three all-reduces of N elements (float32, or float64 for float64): the maximum (no placement),
//                the sum of exponentials, and the target's logit. With S(1) the lookup reduce-scatters forward and
//                all-gathers backward; the head gathers its input forward and backward

// Shards the table, its lookup, its use as a (tied) head, and the loss. Throws Error (usage) if there are fewer entries
// than ranks; a lookup throws if an id is outside the full vocabulary or the ranks do not divide the tokens of S(1).
void vocab_wise(Embedding& e, Communicator& tp, Placement between);

// ids int32 (...), this rank's shard (V_r, C) of a table of `vocab` entries -> (..., C) in P.
Var vocab_parallel_embedding(const Tensor& ids, const Var& table, const Communicator& tp, int64_t vocab);

// Logits (N, V_r) are sharded over the `vocab` columns; targets int32 (N). Loss and errors are the same on every rank.
Loss vocab_parallel_cross_entropy(Var logits, const Tensor& targets, double scale, Communicator& tp, int64_t vocab);

}  // namespace tessera
