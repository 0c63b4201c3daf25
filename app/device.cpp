// The choice between the host and its GPUs.
#include "app/device.h"

#include "tensor/cuda/gpus.h"
#include "tensor/error.h"

namespace tessera {
namespace {

cuda::KernelChoice kernels;  // a program has one command line

}  // namespace

int gpu_count() {
  if constexpr (kWithCuda)
    return cuda::gpu_count();
  else
    return 0;
}

void check_device(const std::string& device) {
  if (device == "cpu") return;
  if constexpr (kWithCuda)
    cuda::use_gpu(0);
  else
    throw Error("--device cuda: this program was built without CUDA; expected cpu, or a build with -DTESSERA_CUDA=ON");
}

ArenaPtr rank_arena(const std::string& device, int rank) {
  check_device(device);
  if (device == "cpu") return make_arena();
  if constexpr (kWithCuda) cuda::use_gpu(rank % gpu_count());
  const ArenaPtr arena = make_arena(Device::cuda);
  arena->local<cuda::KernelChoice>() = kernels;
  return arena;
}

void set_kernels(const cuda::KernelChoice& choice) { kernels = choice; }

std::string describe_device() {
  if constexpr (kWithCuda)
    return cuda::describe_gpu();
  else
    return "";
}

}  // namespace tessera
