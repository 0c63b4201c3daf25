// Rows of a table, looked up by integer, and the gradient that goes back to them.
#pragma once
#include "tensor/ops/cross_entropy.h"

namespace tessera {

// The ids where the table lies. If that is elsewhere they are checked and copied.
Tensor ids_beside(const Tensor& table, const Tensor& ids, const VocabPart& part = {});

// ids int32 (...), table (V, C) -> (..., C). Throws when an id is outside [0, V), naming its position. On a GPU the ids
// lie there too; one outside gives a row of zeros, and whoever next waits for the GPU is told. Where the table is a
// part of one, ids are those of the whole, and one of another part gives a row of zeros. Cost: one copy.
Tensor embedding(const Tensor& ids, const Tensor& table, const VocabPart& part = {});
// dtable (V, C) = each row the sum of its tokens' gradients in token order; rows without a token become zero. dtable
// may be of another floating dtype than dy (..., C). Cost: one write of dtable, one read of dy.
void embedding_backward(Tensor& dtable, const Tensor& dy, const Tensor& ids, const VocabPart& part = {});

// Kernels of a GPU: ids lie there, operands are contiguous.
namespace cuda {
void embedding(const Tensor& out, const Tensor& ids, const Tensor& table, const VocabPart& part);
// sums (V, C) in the type of sums. Every row is written.
void embedding_backward(const Tensor& sums, const Tensor& dy, const Tensor& ids, const VocabPart& part);
}  // namespace cuda

}  // namespace tessera
