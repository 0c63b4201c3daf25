// Which kernels an arena's ops use where there are several, and which they took: Arena::local, so one of each for every
// rank.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

// Whether this program was built with cuDNN and the headers of its frontend.
inline constexpr bool kWithCudnn = TESSERA_WITH_CUDNN;

// Whose kernels compute attention on a GPU. With our own, a row's bits depend on nothing but the row. `automatic`:
// cuDNN's wherever it serves a problem (tensor/ops/attention/cuda/cudnn_attention.h); KernelLog says where it did not.
// `cudnn`: a problem that it refuses is an error.
enum class AttentionKernels : uint8_t { automatic, cudnn, own };

struct KernelChoice {
  AttentionKernels attention = AttentionKernels::own;
  // The same bits in every run and process: cuDNN's gradients are added in a fixed order, which takes a workspace of
  // 2 B H T^2 bytes, and products take the library's first proposal instead of the one that was timed as the fastest.
  bool deterministic = false;
};

// A kernel is counted when it is queued; those of a captured step so count once, however often the step is launched
// again.
struct KernelLog {
  struct Attention {
    int64_t cudnn = 0, tensor_cores = 0, plain = 0;
  };
  Attention forward, backward;
  std::vector<std::string> refused;  // why cuDNN did not serve what it was asked for; each reason once
  // Passes beside a product (tensor/ops/matmul/matmul.h): made by its epilogue, or by a kernel of their own.
  struct Pass {
    int64_t fused = 0, apart = 0;
    bool count(bool is_fused) {
      ++(is_fused ? fused : apart);
      return is_fused;
    }
  };
  Pass gelu, gelu_gradient, bias_sums;
  int64_t padded_products = 0;  // products of operands that were copied into rows of another length first

  void refuse(const std::string& why) {
    if (std::find(refused.begin(), refused.end(), why) == refused.end()) refused.push_back(why);
  }
};

}  // namespace tessera
