// The gradient norm in its fixed order.
#include "optim/grad_norm.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "tensor/cpu/vectorize.h"
#include "tensor/math.h"

namespace tessera {
namespace {

constexpr int64_t kLanes = 16;

using Lanes = std::array<double, kLanes>;

// The block at x, of which `n` elements are there.
template <class G>
double block_sum(const G* x, int64_t n) {
  Lanes lanes{};
  if (n == kNormBlock) {
    for (int64_t i = 0; i < kNormBlock; i += kLanes)
      for (int64_t l = 0; l < kLanes; ++l) {
        const double g = static_cast<double>(x[i + l]);
        lanes[static_cast<size_t>(l)] = math::fma(g, g, lanes[static_cast<size_t>(l)]);
      }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const double g = static_cast<double>(x[i]);
      double& lane = lanes[static_cast<size_t>(i % kLanes)];
      lane = math::fma(g, g, lane);
    }
  }
  for (size_t half = kLanes / 2; half > 0; half /= 2)
    for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

}  // namespace

void block_sums(const Tensor& grads, double* sums) {
  const int64_t n = grads.numel();
  with_floating(grads.dtype(), "grad_norm", [&](auto type) {
    using G = decltype(type);
    const G* const x = grads.data<G>();
    cpu::parallel_for(norm_blocks(n), cpu::kGrain / kNormBlock, [=](int64_t from, int64_t to) {
      for (int64_t b = from; b < to; ++b)
        sums[b] = block_sum(x + b * kNormBlock, std::min(kNormBlock, n - b * kNormBlock));
    });
  });
}

double sum_of_squares(const Tensor& grads) {
  const int64_t blocks = norm_blocks(grads.numel());
  const Tensor sums = grads.make({blocks}, DType::float64, Category::workspace);
  block_sums(grads, sums.data<double>());
  double sum = 0;
  for (int64_t b = 0; b < blocks; ++b) sum += sums.data<double>()[b];
  return sum;
}

std::vector<double> unit_sums(std::span<const FlatUnit> units) {
  std::vector<double> sums;
  for (const FlatUnit& unit : units) sums.push_back(sum_of_squares(unit.grads));
  return sums;
}

double sum_of_squares(std::span<const FlatUnit> units) {
  double total = 0;
  for (const double sum : unit_sums(units)) total += sum;
  return total;
}

double grad_norm(std::span<const FlatUnit> units) { return std::sqrt(sum_of_squares(units)); }

double clip_factor(double norm, double max_norm) {
  if (!(max_norm >= 0)) throw Error(fmt::format("[clip] clip is {}; expected a norm, or 0 for no clipping", max_norm));
  if (max_norm == 0) return 1;
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1 : factor;
}

}  // namespace tessera
