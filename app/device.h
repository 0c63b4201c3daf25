// Where a rank computes: what --device means.
#pragma once
#include <string>

#include "parallel/comm/communicator.h"
#include "tensor/arena.h"
#include "tensor/cuda/kernel_choice.h"

namespace tessera {

// Throws Error (usage) in one line when "cuda" is asked for and this program was built without CUDA, or this machine
// has no GPU.
void check_device(const std::string& device);
// Memory for a rank's tensors: the host's, or that of the GPU of its number on this machine, counted over again where
// there are fewer GPUs than ranks. That GPU becomes the calling thread's.
ArenaPtr rank_arena(const std::string& device, int rank_here);
// The same of a rank of `world`, for what it exchanges with the others (Communicator::make_arena()).
ArenaPtr rank_arena(const std::string& device, const Communicator& world);
// Where optimizer state waits with --offload optimizer: a file that is mapped, or for ranks on a GPU the host's pinned
// memory.
ArenaPtr offload_arena(const std::string& device);
// Which kernels the arenas that rank_arena() makes from now on use on GPUs. To be called before ranks are.
void set_kernels(const cuda::KernelChoice& choice);
// For people: the GPU that the calling thread uses.
std::string describe_device();
int gpu_count();  // 0 in a build without CUDA

}  // namespace tessera
