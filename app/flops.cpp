// Counting, and timing of products.
#include "app/flops.h"

#include <algorithm>
#include <chrono>

#include "tensor/ops/matmul.h"

namespace tessera {

double flops_per_token(Gpt& model) {
  const GptConfig& c = model.config;
  const auto weights =
      static_cast<double>(model.parameter_count() - c.context * c.channels);  // positions are looked up
  return 6 * weights + 12 * static_cast<double>(c.layers * c.channels * c.context);
}

double measured_peak_flops(DType dtype, const ArenaPtr& arena) {
  constexpr int64_t n = 1024;
  Tensor a = Tensor::empty({n, n}, dtype, arena), b = Tensor::empty({n, n}, dtype, arena);
  a.fill(0.5);
  b.fill(0.25);
  double best = 0;
  for (int round = 0; round < 6; ++round) {
    const auto start = std::chrono::steady_clock::now();
    matmul(a, b);
    best = std::max(best,
                    2.0 * n * n * n / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

}  // namespace tessera
