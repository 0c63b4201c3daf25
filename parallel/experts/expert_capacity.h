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
#pragma once
#include "parallel/context_parallel.h"

namespace tessera {

// chosen (N, k), int32, of this rank's tokens of so many sequences, in the order of context_positions() -> int32 (N,
// k): how many choices of the same expert come before each in its whole sequence. On the host; every rank of `cp` calls
// it.
Tensor earlier_choices(const Tensor& chosen, int64_t sequences, int64_t experts, Communicator& cp, Balance balance);

}  // namespace tessera
