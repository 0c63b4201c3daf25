// Which kernels an arena's ops took where there are several: Arena::local, one record for each rank. A kernel is
// counted when it is queued; those of a captured step so count once, however often the step is launched again.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::cuda {

struct KernelLog {
  struct Attention {
    int64_t cudnn = 0, tensor_cores = 0, plain = 0;
  };
  Attention forward, backward;
  std::vector<std::string> refused;  // why cuDNN did not serve what it was asked for; each reason once
  // Passes beside a product (tensor/cuda/matmul.h): made by its epilogue, or by a kernel of their own.
  struct Pass {
    int64_t fused = 0, apart = 0;
    bool count(bool is_fused) {
      ++(is_fused ? fused : apart);
      return is_fused;
    }
  };
  Pass gelu, gelu_gradient, bias_sums;
  int64_t padded_products = 0;  // of operands that were copied into rows of another length first

  void refuse(const std::string& why) {
    if (std::find(refused.begin(), refused.end(), why) == refused.end()) refused.push_back(why);
  }
};

}  // namespace tessera::cuda
