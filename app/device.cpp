// The choice between the host and its GPUs.
#include "app/device.h"

#include <filesystem>

#include "data/files.h"
#include "tensor/cuda/gpus.h"
#include "tensor/cuda/matmul.h"
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

ArenaPtr rank_arena(const std::string& device, int rank_here) {
  check_device(device);
  if (device == "cpu") return make_arena();
  if constexpr (kWithCuda) {
    cuda::use_gpu(rank_here % gpu_count());
    cuda::keep_algorithms_in(cache_directory());  // so that the next run finds what this one times
  }
  ArenaPtr arena = make_arena(Device::cuda);
  arena->local<cuda::KernelChoice>() = kernels;
  return arena;
}

ArenaPtr rank_arena(const std::string& device, const Communicator& world) {
  return device == "cpu" ? world.make_arena() : rank_arena(device, world.rank_here());
}

ArenaPtr offload_arena(const std::string& device) {
  return device == "cuda" ? make_pinned_arena() : make_file_arena(std::filesystem::temp_directory_path());
}

void set_kernels(const cuda::KernelChoice& choice) { kernels = choice; }

std::string describe_device() {
  if constexpr (kWithCuda)
    return cuda::describe_gpu();
  else
    return "";
}

}  // namespace tessera
