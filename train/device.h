// Devices: the GPU, memory and kernels of a rank.
#pragma once
#include <string>

#include "parallel/comm/communicator.h"
#include "tensor/arena.h"
#include "train/config.h"

namespace tessera {

// Throws Error (usage) if a GPU is requested and this build or this machine has none.
void check_device(Device device);
// Arena for a rank's tensors, on the host or on the GPU of its local rank (modulo the number of GPUs), which becomes
// the calling thread's current device.
ArenaPtr rank_arena(Device device, int local_rank, const KernelChoice& kernels = {});
// Includes communication buffers (Communicator::make_arena()).
ArenaPtr rank_arena(const Plan& plan, const Communicator& world);
// A mapped file, or pinned host memory for ranks on a GPU.
ArenaPtr offload_arena(Device device);
// Names two GPUs of the plan's ranks without peer access to each other; empty if there are none.
std::string gpus_apart(const Plan& plan);
// For display: the calling thread's GPU; the transport that NCCL uses without peer access, or empty.
std::string describe_device();
std::string describe_nccl(const Plan& plan);
int gpu_count();  // 0 without CUDA

// Whether the plan requests cuDNN attention (Plan::attention, Plan::deterministic); the default in builds with cuDNN.
bool asks_cudnn(const Plan& plan);
KernelChoice select_kernels(const Plan& plan);
// Throws FieldError if the plan requires cuDNN kernels that are unavailable or do not support this run (no fallback).
void check_attention(const Plan& plan);
void check_attention(const TrainConfig& job);
// Throws FieldError if the run computes in bf16 on a GPU without bf16 matmuls.
void check_bfloat16(const TrainConfig& job);
// For display: the attention kernels of a GPU run and the reason, in one line. Queries the GPU only if nothing else
// rules out cuDNN.
std::string describe_attention(const TrainConfig& job);

// Returns `world`. Throws the same Error (usage) on every rank, naming the field, if the ranks' jobs differ, because
// such ranks would deadlock. Collective.
Communicator& with_one_job(Communicator& world, TrainConfig job);

}  // namespace tessera
