// Tensor parallelism: the matrices of a layer are cut over ranks, in pairs whose inner dim is never put together
// (Shoeybi et al. 2019, "Megatron-LM", section 3). Sequence parallelism: activations between two such pairs are cut by
// tokens, so that nothing of the layer exists twice (Korthikanti et al. 2022, "Reducing activation recomputation in
// large transformer models", section 4.2). The ranks must divide the heads, and with S(1) the tokens.
//
//            x between     colwise            here alone              rowwise            x between
//   rank 0   [ I or S ] -> [ W1 rows 0.. ] -> heads, hidden 0..   -> [ W2 columns 0.. ] -> P -> [ I or S ]
//   rank 1   [ I or S ] -> [ W1 rows ..n ] -> heads, hidden ..n   -> [ W2 columns ..n ] -> P -> [ I or S ]
//                       f                                                               g
//
//                          between = I (tensor parallel)           between = S(1) (sequence parallel too)
//   colwise weight, bias   S(0), S(0); a fused [q | k | v] by segments, so that every rank has its heads of each
//   rowwise weight, bias   S(1), I                                 S(1), I seen as R
//   norms                  I                                       I seen as R
//   f: between -> R        forward -, backward all-reduce          forward all-gather, backward reduce-scatter
//   g: P -> between        forward all-reduce, backward -          forward reduce-scatter, backward all-gather
//   norms, dropout         all tokens on every rank                a rank's own tokens
//
// volume per layer and micro-batch, of N = e B T C bytes: 2 all-reduces of N forward and 2 backward; with S(1) each is
// a reduce-scatter and an all-gather, 2 more all-gathers bring the inputs of the column layers back in the backward
// pass, for they are kept as pieces, and 6 all-reduces of C numbers (float32 under bfloat16) sum the gradients of two
// norms and two row biases.
//
// Overlap, in the backward pass of a column layer: the sum of the input's gradient is on its way while the weight's
// gradient is made, and with S(1) the input comes back while the input's gradient is made:
//
//   this rank     dx = dy W             dW = dy^T x
//   background    [ gather x ]          [ reduce dx ]
//
// With DeferredWeightGrads the sum is waited for at once, and an input that came back is kept until dW is made; the
// gradient of a row bias is summed over ranks when it is made. So all ranks run deferred work in the same order.
#pragma once

#include "nn/layers.h"
#include "parallel/placement.h"

namespace tessera {

// All of these are called before the module has memory, do nothing on an axis of size 1, and keep `tp`, which must
// outlive the module. `in`, `out` and `between` are I or S(dim of the tokens).

// Keeps this rank's part of each of the segments that the outputs are made of, given by their sizes; empty: one. Throws
// Error (usage) when a segment has fewer rows than there are ranks.
void colwise(Linear& l, Communicator& tp, Placement in, const std::vector<int64_t>& segments = {});
// Keeps this rank's part of the inputs. The bias is added to the sum, once; the layer has no activation.
void rowwise(Linear& l, Communicator& tp, Placement out);
// A module that works on each token for itself (a norm).
void token_wise(Module& module, Communicator& tp, Placement between);
// Draws for this rank's tokens; a training step must say how many there are (StepInfo::tokens_total, or positions).
void token_wise(Dropout& dropout, Communicator& tp, Placement between);
// Both projections by heads: this rank's heads of the queries, and of keys and values. Dropout draws for these heads. A
// norm of heads sums its gradient over the ranks. Throws Error (usage) when the ranks do not divide both numbers.
void head_wise(Attention& attention, Communicator& tp, Placement between);

// --- the parts of the functions above ---

// This rank's part of a parameter of `module` along `dim`, of each of `segments`.
void cut_over_ranks(Module& module, const Var& parameter, int dim, const Communicator& tp,
                    const std::vector<int64_t>& segments = {});
// The input of a column layer, in `in` between layers.
std::shared_ptr<const SharedInput> column_input(Communicator& tp, Placement in);
// P -> between. Throws Error (usage) when the ranks do not divide the tokens.
Var join(Var partial, Communicator& tp, Placement between);

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
