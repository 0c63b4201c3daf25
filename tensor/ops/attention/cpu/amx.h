// Attention of bfloat16 on the processor's tiles: the walk of tensor/ops/attention/attention.h with each 64 x 64
// product as four calls of tile_block(). Scores and sums are float32; probabilities and their gradients are rounded to
// bfloat16 where a product takes them, as they are where there are no tiles.
#pragma once
#include "tensor/ops/attention/attention.h"

namespace tessera::cpu {

// Whether the functions below serve a call: bfloat16, tiles in the processor, and queries enough to fill them.
bool amx_takes_attention(const AttentionProblem& p);

void amx_attention(const AttentionProblem& p, const Attended& result);
void amx_attention_backward(const AttentionProblem& p, const Tensor& dout, const Attended& forward,
                            const AttentionGradients& gradients);

}  // namespace tessera::cpu
