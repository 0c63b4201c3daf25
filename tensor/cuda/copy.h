// Copies and fills of tensors on a GPU, and bytes between it and the host.
#pragma once
#include "tensor/tensor.h"

namespace tessera::cuda {

// Between a contiguous tensor on a GPU and one on the host, of the same dtype and size, either way. Returns when the
// bytes are there.
void copy_bytes(const Tensor& to, const Tensor& from);
// As Tensor::copy_from and Tensor::fill, both tensors on one GPU. Queued on the stream of `to`'s arena.
void copy(const Tensor& to, const Tensor& from);
void fill(const Tensor& t, double value);
// The host waits for all that is queued on the arena's stream; throws what failed there.
void synchronize(Arena& arena);

}  // namespace tessera::cuda
