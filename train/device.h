// Where a rank computes: what a plan's device means.
#pragma once

#include "parallel/comm/communicator.h"
#include "tensor/arena.h"
#include "train/job.h"

namespace tessera {

// Throws Error (usage) in one line when a GPU is asked for and this program was built without CUDA, or this machine
// has none.
void check_device(Device device);
// Memory for a rank's tensors: the host's, or that of the GPU of its number on this machine, counted over again where
// there are fewer GPUs than ranks. That GPU becomes the calling thread's.
ArenaPtr rank_arena(Device device, int local_rank, const KernelChoice& kernels = {});
// Memory of a rank of `world`, also for what it exchanges with the others (Communicator::make_arena()).
ArenaPtr rank_arena(const Plan& plan, const Communicator& world);
// Where what is offloaded waits: a file that is mapped, or for ranks on a GPU the host's pinned memory.
ArenaPtr offload_arena(Device device);
// Two GPUs of this machine that the plan's ranks use, and of which one does not reach the other's memory; empty: none.
std::string gpus_apart(const Plan& plan);
// For people: the GPU that the calling thread uses; and the way of NCCL's messages where GPUs do not reach each other's
// memory, or nothing.
std::string describe_device();
std::string describe_nccl(const Plan& plan);
int gpu_count();  // 0 in a build without CUDA

// Which kernels compute a run's attention on a GPU: cuDNN's or our own (Plan::attention, Plan::deterministic).

// Whether cuDNN is to be asked: what the plan says, and otherwise wherever this program was built with cuDNN.
bool asks_cudnn(const Plan& plan);
KernelChoice select_kernels(const Plan& plan);
// Throws FieldError where the plan asks for cuDNN's kernels, and they are not there; or cannot serve this run: it never
// means our own in their place.
void check_attention(const Plan& plan);
void check_attention(const Job& job);
// Throws FieldError where the run computes in bf16 on a GPU that makes no such products.
void check_bfloat16(const Job& job);
// For people, of a run on a GPU: whose kernels compute its attention, and why, in one line. Asks the GPU only where
// nothing else keeps cuDNN from serving it.
std::string describe_attention(const Job& job);

// Returns the world. Throws Error (usage), the same on every rank, that names what differs where the ranks' jobs do:
// they would wait for messages that nobody sends. Every rank calls it.
Communicator& with_one_job(Communicator& world, Job job);

}  // namespace tessera
