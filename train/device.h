// Where a rank computes: what a plan's device means.
#pragma once

#include "parallel/comm/communicator.h"
#include "tensor/arena.h"
#include "tensor/kernels.h"
#include "train/plan.h"

namespace tessera {

// Throws Error (usage) in one line when a GPU is asked for and this program was built without CUDA, or this machine
// has none.
void check_device(Device device);
// Memory for a rank's tensors: the host's, or that of the GPU of its number on this machine, counted over again where
// there are fewer GPUs than ranks. That GPU becomes the calling thread's.
ArenaPtr rank_arena(Device device, int rank_here, const KernelChoice& kernels = {});
// The same of a rank of `world`, for what it exchanges with the others (Communicator::make_arena()).
ArenaPtr rank_arena(const Plan& plan, const Communicator& world);
// Where what is offloaded waits: a file that is mapped, or for ranks on a GPU the host's pinned memory.
ArenaPtr offload_arena(Device device);
// For people: the GPU that the calling thread uses.
std::string describe_device();
int gpu_count();  // 0 in a build without CUDA

}  // namespace tessera
