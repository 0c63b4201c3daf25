// Measuring the roofs.
#include "bench/ceilings.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>

#include "tensor/cpu/vectorize.h"
#include "tensor/ops/matmul/matmul.h"
#include "tensor/random.h"

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

// On a GPU numbers that are alike are multiplied faster than others.
Tensor drawn_square(int64_t n, DType dtype, const ArenaPtr& arena) {
  Tensor square = Tensor::empty({n, n}, DType::float32, arena->host());
  const Philox random = Philox::named(1, "ceiling");
  for (int64_t i = 0; i < n * n; ++i) square.data<float>()[i] = random.uniform(static_cast<uint64_t>(i)) - 0.5F;
  return square.to(dtype).to(arena);
}

void copy_by_all_threads(const Tensor& to, const Tensor& from) {
  cpu::split(from.numel(), 1024, [&](int64_t begin, int64_t end) {
    std::memcpy(to.data<double>() + begin, from.data<double>() + begin, static_cast<size_t>(end - begin) * 8);
  });
}

}  // namespace

double copy_rate(int64_t bytes, double seconds) { return 2.0 * static_cast<double>(bytes) / seconds; }

double product_rate(int64_t n, double seconds) {
  const auto side = static_cast<double>(n);
  return 2 * side * side * side / seconds;
}

Rates rates_of(double bytes, double flops, double seconds, const Ceilings& c) {
  return {bytes / seconds, flops / seconds, std::max(bytes / c.bytes_per_s, flops / c.flops) / seconds};
}

Ceilings measure_ceilings(DType dtype, int64_t bytes, const ArenaPtr& arena) {
  const bool on_gpu = arena->device() == Device::cuda;
  const Tensor from = Tensor::zeros({bytes / 8}, DType::float64, arena);
  Tensor to = from.clone();
  const double copy = best_seconds([&] {
    on_gpu ? to.copy_from(from) : copy_by_all_threads(to, from);
    wait_for(arena);
  });
  const int64_t n = on_gpu ? 8192 : 1024;
  const Tensor a = drawn_square(n, dtype, arena), b = drawn_square(n, dtype, arena);
  const double product = best_seconds([&] {
    matmul(a, b);
    wait_for(arena);
  });
  return {copy_rate(bytes, copy), product_rate(n, product)};
}

}  // namespace tessera::bench
