// Which GPUs there are, and which one a rank uses.
#pragma once
#include <string>

namespace tessera::cuda {

int gpu_count();  // 0 where there is no driver
// Whether this program was built with kernels of float64 (-DTESSERA_FLOAT64_KERNELS), which serve checks. Without them
// ops of float64 tensors on a GPU throw Error, but for copies, sums and what adds up losses.
bool has_float64_kernels();
// "NVIDIA H200, 132 multiprocessors, 139.7 GiB" of the calling thread's GPU.
std::string describe_gpu();
// Makes `gpu` the calling thread's. Throws Error (status 2) in one line when there is none of that number, or when this
// program holds no code for it.
void use_gpu(int gpu);

}  // namespace tessera::cuda
