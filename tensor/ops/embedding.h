// Embedding: row lookup in a table by integer ids, and its gradient.
#pragma once
#include "tensor/ops/cross_entropy.h"

namespace tessera {

// The ids on the table's device; copied after a range check if they are on another device.
Tensor ids_beside(const Tensor& table, const Tensor& ids, const VocabPart& part = {});

// ids int32 (...), table (V, C) -> (..., C). Throws an Error that names the position of an id outside [0, V). On a GPU
// the ids must be on the same device; an invalid id returns a row of zeros, and the next wait for the GPU throws. If
// the table is a vocabulary shard, ids refer to the full table, and ids of other shards return rows of zeros. Cost: one
// copy.
Tensor embedding(const Tensor& ids, const Tensor& table, const VocabPart& part = {});
// dtable (V, C): each row is the sum of its tokens' gradients in token order; rows without tokens become zero. dtable
// may have another floating dtype than dy (..., C). Cost: one write of dtable, one read of dy.
void embedding_backward(Tensor& dtable, const Tensor& dy, const Tensor& ids, const VocabPart& part = {});

// GPU kernels: ids on the GPU, operands contiguous.
namespace cuda {
void embedding(const Tensor& out, const Tensor& ids, const Tensor& table, const VocabPart& part);
// sums (V, C) in the accumulation dtype. Writes every row.
void embedding_backward(const Tensor& sums, const Tensor& dy, const Tensor& ids, const VocabPart& part);
}  // namespace cuda

}  // namespace tessera
