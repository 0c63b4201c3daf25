// Timing of products.
#include "app/flops.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "bench/op_bench.h"
#include "tensor/ops/matmul/matmul.h"
#include "tensor/random.h"

namespace tessera {

namespace {

// The shortest of a few products of n x n matrices.
double product_seconds(const Tensor& a, const Tensor& b) {
  double best = 1e9;
  for (int round = 0; round < 6; ++round) {
    const auto start = std::chrono::steady_clock::now();
    matmul(a, b).narrow(0, 0, 1).on_host();  // on a GPU a product is done when some of it can be read
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

// On a GPU numbers that are alike are multiplied faster than others: eight random rows, over and over.
Tensor drawn_square(int64_t n, DType dtype, const ArenaPtr& arena) {
  std::vector<float> rows(static_cast<size_t>(8 * n));
  const Philox random = Philox::named(1, "product");
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = random.uniform(i) - 0.5F;
  Tensor square = Tensor::empty({n, n}, dtype, arena);
  square.reshape({n / 8, 8, n}).copy_from(Tensor::of<float>(rows, {8, n}, arena));
  return square;
}

// The rate of products of matrices that are large enough to take a millisecond.
double gpu_peak_flops(DType dtype, const ArenaPtr& arena) {
  constexpr int64_t most = 8192;
  for (int64_t n = 128;; n *= 2) {
    const double seconds = product_seconds(drawn_square(n, dtype, arena), drawn_square(n, dtype, arena));
    if (seconds > 1e-3 || n == most) return bench::product_rate(n, seconds);
  }
}

}  // namespace

double measured_peak_flops(DType dtype, const ArenaPtr& arena) {
  if (arena->device() == Device::cuda) return gpu_peak_flops(dtype, arena);
  constexpr int64_t n = 1024;
  Tensor a = Tensor::empty({n, n}, dtype, arena), b = Tensor::empty({n, n}, dtype, arena);
  a.fill(0.5);
  b.fill(0.25);
  return bench::product_rate(n, product_seconds(a, b));
}

int64_t ranks_at_once(int64_t ranks, int64_t processors, int64_t each) {
  return std::clamp<int64_t>(processors / each, 1, ranks);
}

}  // namespace tessera
