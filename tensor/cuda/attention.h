// Attention on a GPU, as tensor/ops/attention.h says it; operands and results are checked there, and the options are
// complete (scale, totals and first_query are set).
//
// Where the arena's KernelChoice says so, cuDNN's kernels serve what they can (cudnn_attention.h): bfloat16, as many
// queries as keys, no dropout. What a ring merges has results in the type of its sums and is always ours.
//
// Two kinds of kernels of our own. Those for tensor cores (attention_tiles.cuh) take bfloat16 with 64 or 128 numbers
// per head whose rows begin at multiples of 16 bytes; plain ones (attention_plain.cuh) take everything. None adds with
// atomics: the gradient of the queries and those of keys and values are made by two kernels. Bits of a row depend
// neither on its place in the batch nor on what else is there.
#pragma once
#include "tensor/ops/attention.h"

namespace tessera::cuda {

void attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionOptions& options,
               const Attended& result);
struct AttentionGradients {
  Tensor dq, dk, dv;
};
void attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Attended& forward,
                        const AttentionOptions& options, const AttentionGradients& gradients);

// "tensor cores" or "plain": which of our kernels take operands like these, for the log of a run and for tests.
const char* attention_kernels(const Tensor& q, const Tensor& k, const Tensor& v);

}  // namespace tessera::cuda
