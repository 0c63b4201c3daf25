// Kernel selection and log, stored per rank in Arena::local.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

inline constexpr bool kWithCudnn = TESSERA_WITH_CUDNN;

// Attention on a GPU. `own`: Tessera's kernels, whose rows are independent of each other. `automatic`: cuDNN if it
// supports the problem (tensor/ops/attention/cuda/cudnn_attention.h); KernelLog records why not. `cudnn`: an
// unsupported problem is an error.
enum class AttentionKernels : uint8_t { automatic, cudnn, own };

struct KernelChoice {
  AttentionKernels attention = AttentionKernels::own;
  // Bitwise identical results in every run: cuDNN accumulates gradients in a fixed order, with a workspace of 2 B H T^2
  // bytes, and matmuls use cuBLASLt's first proposal instead of the fastest.
  bool deterministic = false;
  // Reductions that tensor or sequence parallelism may split add by fixed leaves (tensor/ops/matmul/leaves.h). CPU
  // only.
  bool layout_invariant = false;
};

// Counts queued kernels; kernels of a captured step count once.
struct KernelLog {
  struct Attention {
    int64_t cudnn = 0, tensor_cores = 0, plain = 0;
  };
  Attention forward, backward;
  std::vector<std::string> refused;  // unique reasons why cuDNN did not run
  // Fused into a matmul's epilogue or run separately (tensor/ops/matmul/matmul.h).
  struct Pass {
    int64_t fused = 0, apart = 0;
    bool count(bool is_fused) {
      ++(is_fused ? fused : apart);
      return is_fused;
    }
  };
  Pass gelu, gelu_gradient, bias_sums;
  int64_t padded_products = 0;  // matmuls with padded copies of operands

  void refuse(const std::string& why) {
    if (std::find(refused.begin(), refused.end(), why) == refused.end()) refused.push_back(why);
  }
};

}  // namespace tessera
