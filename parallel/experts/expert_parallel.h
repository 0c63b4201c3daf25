// Expert parallelism: the ranks of an axis share out the experts of each layer, and tokens travel to them (Lepikhin et
// al. 2020, "GShard"; Fedus et al. 2021, "Switch transformers"). Each rank has its own sequences: the axis is cut
// out of the data axis.
//
//   rank 0: its tokens  [to 0 1 | to 2 3] --.    .--> rank 0: experts 0 1   rows of rank 0, then rows of rank 1
//                                             \  /
//                                              ><          first how many for each expert, then the rows
//                                             /  \.
//   rank 1: its tokens  [to 0 1 | to 2 3] --'    '--> rank 1: experts 2 3   rows of rank 0, then rows of rank 1
//
// placements     experts: on one rank of the axis each, their gradients summed over the ranks of the data axis that
//                have them; all else as without the axis
// memory/rank    1 / e of the experts' parameters, gradients and state
// volume/rank    per layer and micro-batch: (e - 1) / e E numbers of 8 bytes, and of the actual routing: a row of C
//                values for each choice whose expert is on another rank, there and back, forward and backward: 4 rows,
//                or 6 where the backward pass makes the layer again
//
// Where a layer has a shared expert too, which meets every token, this is computed while rows travel to the experts,
// and its backward pass while their gradients travel home (parallel/experts/expert_parallel.h).
//
// An expert's gradient is made fresh of the rows of one rank at a time, those that it would see if it lived there, and
// added in the order of ranks. So nothing but the order in which groups of ranks are added tells how many ranks share
// out the experts.
#pragma once

#include "nn/experts/experts.h"
#include "parallel/context_parallel.h"
#include "parallel/placement.h"

namespace tessera {

// Rank r of n has experts [r E / n, (r + 1) E / n); n divides E, or Error is thrown. `ep` must outlive the layer; every
// rank of it makes the same passes.
void shard_experts(MixtureOfExperts& layer, Communicator& ep);

// Every expert is cut over tp as a feed-forward layer is (parallel/tensor_parallel.h); all ranks route all tokens
// alike:
//
//   x between --f--> R --dispatch--> experts' rows, hidden 0..n of each --combine--> P --g--> between
//   x between --router--> logits, I --route--> weights --f--> R
//
// Volume besides that of a feed-forward layer, per micro-batch of N tokens: backward an all-reduce of the N k weights'
// gradients; with S(1) also an all-gather of the logits, and the router's gradient is summed. But the input of the
// experts stays whole: nothing is gathered again. Throws Error (usage) as colwise() does.
void cut_experts(MixtureOfExperts& layer, Communicator& tp, Placement between);
// Each rank of cp has the tokens at context_positions() of every sequence. The balance loss counts the choices of
// all of them, by an all-reduce of a number for each sequence and expert. A capacity is that of whole sequences, for
// which an all-gather of the choices tells the ranks what comes before their own: earlier_choices().
void count_over(MixtureOfExperts& layer, Communicator& cp, SequencePartition balance);

// Rows of x (R, C) to other ranks: the first sent[0] to rank 0, and so on; received[r] come from rank r. The gradient
// goes the other way.
Var exchange_rows(const Var& x, Communicator& axis, const std::vector<int64_t>& sent,
                  const std::vector<int64_t>& received);

// Rows of a mixture of experts on their way between ranks, while something else is computed:
//
//   forward    start_rows(x) --- what is made between --- rows()     the rows travel meanwhile
//   backward   their gradients have come <--- its backward pass --- their gradients set out
//
// The backward pass goes through nodes from the newest to the oldest, so what is made between the two calls lies
// between them there too.

// The arrays of an exchange of rows (R, C): so many of `in` for each rank, and so many of `out` from it; in elements.
struct RowArrays {
  RowArrays(const Tensor& x, const std::vector<int64_t>& rows_sent, const std::vector<int64_t>& rows_received);
  Tensor in, out;
  std::vector<int64_t> sent, received;
};

// Rows of x (R, C) set out: the first sent[0] to rank 0, and so on; received[r] come from rank r. The function gives
// those when they have come, and is to be called once. The gradient goes the other way. Every rank of the axis, which
// must outlive the graph, makes the same calls.
std::function<Var()> start_rows(const Var& x, Communicator& axis, const std::vector<int64_t>& sent,
                                const std::vector<int64_t>& received);

// Tells which choices of experts find a place where ranks have parts of the same sequences: those that would find one
// if the whole sequence were here. An expert takes first choices of all tokens first, then second ones, in order of
// tokens, and this order goes through the parts of all ranks:
//
//   zig-zag, c = 2: tokens   0 1 | 2 3 | 4 5 | 6 7      rank 0 has 0 1 6 7, rank 1 has 2 3 4 5
//   round 1                  1 2   3 4   5 6   7 8
//   round 2                  9 ...
//
// The numbers say in which order an expert's places are given. A choice has a place if fewer than the capacity come
// before it that want the same expert.
//
// volume/rank  (c - 1) / c of 4 bytes for each choice of all tokens, per layer and micro-batch

// chosen (N, k), int32, of this rank's tokens of so many sequences, in the order of context_positions() -> int32 (N,
// k): how many choices of the same expert come before each in its whole sequence. On the host; every rank of `cp` calls
// it.
Tensor earlier_choices(const Tensor& chosen, int64_t sequences, int64_t experts, Communicator& cp,
                       SequencePartition balance);

}  // namespace tessera
