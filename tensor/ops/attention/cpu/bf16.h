// Attention of bfloat16 by products of pairs: the walk of tensor/ops/attention/attention.h with each 64 x 64 product as
// four blocks, made by the processor's tiles (AMX) or by its pair products (AVX512_BF16). Scores and sums are float32;
// probabilities and their gradients are rounded to bfloat16 where a product takes them, as they are everywhere else.
#pragma once
#include "tensor/ops/attention/attention.h"

namespace tessera::cpu {

// Whether the functions below serve a call: bfloat16, such products in the processor, and queries enough to fill them.
bool bf16_takes_attention(const AttentionProblem& p);

void bf16_attention(const AttentionProblem& p, const Attended& result);
void bf16_attention_backward(const AttentionProblem& p, const Tensor& dout, const Attended& forward,
                             const AttentionGradients& gradients);

}  // namespace tessera::cpu
