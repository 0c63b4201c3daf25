// The choice between the host and its GPUs.
#include "train/device.h"

#include <filesystem>

#include "data/files.h"
#include "tensor/cuda/gpus.h"
#include "tensor/error.h"
#include "tensor/ops/matmul/cuda/product.h"
#include "train/attention_choice.h"

namespace tessera {

int gpu_count() {
  if constexpr (kWithCuda)
    return cuda::gpu_count();
  else
    return 0;
}

void check_device(Device device) {
  if (device == Device::cpu) return;
  if constexpr (kWithCuda)
    cuda::use_gpu(0);
  else
    throw Error("`device` cuda: this program was built without CUDA; expected cpu, or a build with -DTESSERA_CUDA=ON");
}

ArenaPtr rank_arena(Device device, int rank_here, const KernelChoice& kernels) {
  check_device(device);
  if (device == Device::cpu) return make_arena();
  if constexpr (kWithCuda) {
    cuda::use_gpu(rank_here % gpu_count());
    cuda::keep_algorithms_in(cache_directory());  // so that the next run finds what this one times
  }
  ArenaPtr arena = make_arena(Device::cuda);
  arena->local<KernelChoice>() = kernels;
  return arena;
}

ArenaPtr rank_arena(const Plan& plan, const Communicator& world) {
  if (plan.device == Device::cpu) return world.make_arena();
  return rank_arena(plan.device, world.rank_here(), kernels_of(plan));
}

ArenaPtr offload_arena(Device device) {
  return device == Device::cuda ? make_pinned_arena() : make_file_arena(temporary_folder());
}

std::string describe_device() {
  if constexpr (kWithCuda)
    return cuda::describe_gpu();
  else
    return "";
}

}  // namespace tessera
