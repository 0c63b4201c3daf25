// Which kernels an arena's ops use where there are several: Arena::local, so one choice for each rank.
#pragma once

namespace tessera::cuda {

// Whether this program was built with cuDNN and the headers of its frontend.
inline constexpr bool kWithCudnn = TESSERA_WITH_CUDNN;

// Whose kernels compute attention. Of our own a row's bits depend on nothing but the row. `cudnn_or_own`: cuDNN's
// wherever it serves a problem (cudnn_attention.h); KernelLog says where it did not. `cudnn`: a problem that it refuses
// is an error.
enum class AttentionKernels { own, cudnn_or_own, cudnn };

struct KernelChoice {
  AttentionKernels attention = AttentionKernels::own;
  // The same bits in every run and process: cuDNN's gradients are added in a fixed order, which takes a workspace of
  // 2 B H T^2 bytes, and products take the library's first proposal instead of the one that was timed as the fastest.
  bool deterministic = false;
};

}  // namespace tessera::cuda
