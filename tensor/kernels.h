// Selection and log of the kernels that an arena's ops use, stored per rank in Arena::local.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

// Whether this program was built with cuDNN and its frontend headers.
inline constexpr bool kWithCudnn = TESSERA_WITH_CUDNN;

// Attention kernels on a GPU. `own`: Tessera's, whose results per row do not depend on other rows. `automatic`: cuDNN
// for every problem it supports (tensor/ops/attention/cuda/cudnn_attention.h); KernelLog records why it was not used.
// `cudnn`: an unsupported problem is an error.
enum class AttentionKernels : uint8_t { automatic, cudnn, own };

struct KernelChoice {
  AttentionKernels attention = AttentionKernels::own;
  // Bitwise identical results in every run and process: cuDNN accumulates gradients in a fixed order, which needs a
  // workspace of 2 B H T^2 bytes, and matmuls use cuBLASLt's first proposal instead of the fastest one.
  bool deterministic = false;
};

// Counts kernels when they are queued; kernels of a captured step count once, regardless of the number of launches.
struct KernelLog {
  struct Attention {
    int64_t cudnn = 0, tensor_cores = 0, plain = 0;
  };
  Attention forward, backward;
  std::vector<std::string> refused;  // distinct reasons why cuDNN did not run a requested attention
  // Passes next to a matmul (tensor/ops/matmul/matmul.h): fused into its epilogue, or a separate kernel.
  struct Pass {
    int64_t fused = 0, apart = 0;
    bool count(bool is_fused) {
      ++(is_fused ? fused : apart);
      return is_fused;
    }
  };
  Pass gelu, gelu_gradient, bias_sums;
  int64_t padded_products = 0;  // matmuls whose operands were first copied to padded rows

  void refuse(const std::string& why) {
    if (std::find(refused.begin(), refused.end(), why) == refused.end()) refused.push_back(why);
  }
};

}  // namespace tessera
