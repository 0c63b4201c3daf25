// Which kernels an arena's ops use where there are several: Arena::local, so one choice for each rank.
#pragma once

namespace tessera::cuda {

// Whether this program was built with cuDNN and the headers of its frontend.
inline constexpr bool kWithCudnn = TESSERA_WITH_CUDNN;

struct KernelChoice {
  // Attention by cuDNN wherever it serves a problem (cudnn_attention.h); otherwise by our own kernels, of which a row's
  // bits depend on nothing but the row.
  bool cudnn = false;
  // The same bits in every run and process: cuDNN's gradients are added in a fixed order, which takes a workspace of
  // 2 B H T^2 bytes, and products take the library's first proposal instead of the one that was timed as the fastest.
  bool deterministic = false;
};

}  // namespace tessera::cuda
