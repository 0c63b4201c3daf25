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
void count_up(const Tensor& t);  // int32, contiguous: 0, 1, ...

// Memory of the host that a GPU reads by itself, while the host goes on.
std::shared_ptr<std::byte> pinned_memory(int64_t bytes);
// Pinned bytes to a contiguous tensor on a GPU. Queued on the stream of its arena: the bytes must stay as they are
// until that has been waited for, and a captured copy (tensor/cuda/gpus.h) reads them anew at each launch.
void copy_later(const Tensor& to, const std::byte* pinned);
// The same beside the kernels: behind what is queued on the arena's stream now, on a stream of its own. `to` must live
// until join_copy() has told the arena's stream to wait for the copy.
std::shared_ptr<void> start_copy(const Tensor& to, const std::byte* pinned);
void join_copy(const Tensor& to, const std::shared_ptr<void>& copy);

// Copies values, as copy_later() does, from a pinned copy that the arena keeps and finds again by the values.
void copy_cached_constant(const Tensor& to, std::span<const std::byte> values);

// Whether this program holds code that the calling thread's GPU can run.
bool has_code_here();

// The host waits for all that is queued on the arena's stream; throws what failed there.
void synchronize(Arena& arena);

}  // namespace tessera::cuda
