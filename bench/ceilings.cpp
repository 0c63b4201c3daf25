// Measuring the roofs.
#include "bench/ceilings.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>

#include "tensor/cpu/vectorize.h"
#include "tensor/ops/matmul.h"

namespace tessera::bench {
namespace {

constexpr int kRounds = 20;

double best_seconds(const std::function<void()>& work) {
  double best = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    work();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

}  // namespace

Ceilings measure_ceilings(DType dtype, int64_t bytes, const ArenaPtr& arena) {
  const Tensor from = Tensor::zeros({bytes / 8}, DType::float64, arena), to = from.clone();
  const double copy = best_seconds([&] {
    cpu::split(bytes / 8, 1024, [&](int64_t begin, int64_t end) {
      std::memcpy(to.data<double>() + begin, from.data<double>() + begin, static_cast<size_t>(end - begin) * 8);
    });
  });
  constexpr int64_t n = 1024;
  Tensor a = Tensor::empty({n, n}, dtype, arena), b = Tensor::empty({n, n}, dtype, arena);
  a.fill(0.5);
  b.fill(0.25);
  const double product = best_seconds([&] { matmul(a, b); });
  return {2.0 * static_cast<double>(bytes) / copy, 2.0 * n * n * n / product};
}

}  // namespace tessera::bench
