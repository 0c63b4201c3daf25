// Embedding lookup and its gradient.
#pragma once
#include "tensor/ops/cross_entropy.h"

namespace tessera {

// ids on the table's device; others are range-checked and copied.
Tensor ids_on_device(const Tensor& table, const Tensor& ids, const VocabShard& shard = {});

// ids int32 (...), table (V, C) -> (..., C). Throws Error naming the position of an id outside [0, V). On a GPU the ids
// must be on the same device, an invalid id returns zeros, and the next wait throws. With a vocabulary shard, ids refer
// to the full table, and ids of other shards return zeros. Cost: one copy.
Tensor embedding(const Tensor& ids, const Tensor& table, const VocabShard& shard = {});
// dtable (V, C): per row the sum of its tokens' gradients in token order, or zero; any floating dtype. dy (..., C).
// Cost: one write of dtable, one read of dy.
void embedding_backward(Tensor& dtable, const Tensor& dy, const Tensor& ids, const VocabShard& shard = {});

namespace cuda {
void embedding(const Tensor& out, const Tensor& ids, const Tensor& table, const VocabShard& shard);
// sums (V, C) in the accumulation dtype; all rows are written.
void embedding_backward(const Tensor& sums, const Tensor& dy, const Tensor& ids, const VocabShard& shard);
}  // namespace cuda

}  // namespace tessera
