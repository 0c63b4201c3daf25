// Copies and fills of tensors on a GPU, and transfers between host and GPU.
#pragma once

#include "tensor/tensor.h"

namespace tessera::cuda {

// Copies between a contiguous tensor on a GPU and one on the host, with equal dtype and size, in either direction.
// Blocks until the copy has finished.
void copy_bytes(const Tensor& to, const Tensor& from);
// As Tensor::copy_from and Tensor::fill, for tensors on one GPU. Queued on the stream of `to`'s arena.
void copy(const Tensor& to, const Tensor& from);
void fill(const Tensor& t, double value);
void fill_range(const Tensor& t);  // int32, contiguous: 0, 1, ...

// Pinned host memory, from which a GPU copies asynchronously.
std::shared_ptr<std::byte> pinned_memory(int64_t bytes);
// Copies pinned bytes to a contiguous tensor on a GPU. Queued on the stream of its arena: the bytes must not change
// until the copy has finished, and a captured copy (tensor/cuda/gpus.h) reads them again at each launch.
void copy_later(const Tensor& to, const std::byte* pinned);
// As copy_later(), overlapping with kernels: on a separate stream, after the work queued on the arena's stream so far.
// `to` must live until join_copy() has made the arena's stream wait for the copy.
std::shared_ptr<void> start_copy(const Tensor& to, const std::byte* pinned);
void join_copy(const Tensor& to, const std::shared_ptr<void>& copy);

// As copy_later(), from a pinned copy that the arena caches under the values.
void copy_cached_constant(const Tensor& to, std::span<const std::byte> values);

// Whether this program contains code for the calling thread's GPU.
bool has_code_here();

// Waits for all work queued on the arena's stream and throws its errors.
void synchronize(Arena& arena);

}  // namespace tessera::cuda
