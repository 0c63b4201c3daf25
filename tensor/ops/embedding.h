// Rows of a table, looked up by integer, and the gradient that goes back to them.
#pragma once
#include "tensor/tensor.h"

namespace tessera {

// The ids where the table lies. If that is elsewhere they are checked and copied.
Tensor ids_beside(const Tensor& table, const Tensor& ids);

// ids int32 (...), table (V, C) -> (..., C). Throws when an id is outside [0, V), naming its position. On a GPU the ids
// lie there too; one outside gives a row of zeros, and whoever next waits for the GPU is told. Cost: one copy.
Tensor embedding(const Tensor& ids, const Tensor& table);
// dtable (V, C) = each row the sum of its tokens' gradients in token order; rows without a token become zero. dtable
// may be of another floating dtype than dy (..., C). Cost: one write of dtable, one read of dy.
void embedding_backward(Tensor& dtable, const Tensor& dy, const Tensor& ids);

}  // namespace tessera
