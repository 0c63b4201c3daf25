// Copies and fills on a GPU, and transfers between host and GPU.
#pragma once
#include <cstdint>
#include <memory>
#include <span>

#include "tensor/tensor.h"

namespace tessera::cuda {

// Copies between contiguous tensors of equal dtype and size on a GPU and on the host; blocks until done.
void copy_bytes(const Tensor& to, const Tensor& from);
// Tensor::copy_from and Tensor::fill, queued on the stream of `to`'s arena.
void copy(const Tensor& to, const Tensor& from);
void fill(const Tensor& t, double value);
void fill_range(const Tensor& t);  // int32, contiguous: 0, 1, ...

std::shared_ptr<std::byte> pinned_memory(int64_t bytes);
// Queues a copy of pinned bytes to a contiguous tensor. The bytes must not change until the copy has finished; a
// captured copy (tensor/cuda/gpus.h) reads them at each launch.
void queue_copy(const Tensor& to, const std::byte* pinned);
// queue_copy() on a separate stream, overlapping subsequent kernels. `to` must live until join_copy().
std::shared_ptr<void> start_copy(const Tensor& to, const std::byte* pinned);
void join_copy(const Tensor& to, const std::shared_ptr<void>& copy);

// queue_copy() from pinned memory that the arena caches by value.
void copy_cached_constant(const Tensor& to, std::span<const std::byte> values);

// Whether the program contains code for the thread's GPU.
bool has_code_here();

void synchronize(Arena& arena);

}  // namespace tessera::cuda
