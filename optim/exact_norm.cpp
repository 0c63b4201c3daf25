// Extraction of bins by adding and subtracting a power of two.
#include "optim/exact_norm.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <span>
#include <type_traits>

#include "tensor/cpu/loops.h"
#include "tensor/math.h"

namespace tessera {
namespace {

// Bin k has multiples of 2^(kTop - kBits k), of at most 2^kBits per element, so 2^32 elements fit into 53 bits.
constexpr int kBits = 20, kTop = 970, kMantissa = 52;
constexpr int64_t kBlock = 256;  // elements that are in L1

// The first bin to which values up to `max` contribute: in the previous one they round to zero.
int first_bin(double max) {
  const int exponent = std::ilogb(max) + 1;  // max < 2^exponent
  return std::clamp((kTop + kBits - 1 - exponent) / kBits, 0, kExactBins - 1);
}

// Adds n values x, which are overwritten.
void add_values(ExactSum& sum, double* x, int64_t n) {
  const auto largest = [x, n] {
    double max = 0;
    cpu::vectorized([&] { max = cpu::lane_max<double>(n, 0.0, [x](int64_t i) { return std::abs(x[i]); }); });
    return max;
  };
  double max = largest();
  if (max == 0) return;
  if (!(max <= std::ldexp(1.0, kTop + kBits - 1))) {
    sum[0] = std::numeric_limits<double>::infinity();
    return;
  }
  for (int bin = first_bin(max); bin < kExactBins && max > 0; ++bin) {
    const double shift = 1.5 * std::ldexp(1.0, kTop - kBits * bin + kMantissa);
    cpu::vectorized([&sum, x, n, bin, shift] {
      sum[static_cast<size_t>(bin)] += cpu::lane_sum<double>(n, [x, shift](int64_t i) {
        const double part = (x[i] + shift) - shift;
        x[i] -= part;
        return part;
      });
    });
    max = largest();
  }
}

template <class T>
void add_block(ExactSum& sum, const T* x, int64_t n) {
  double squares[kBlock], low[kBlock];
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    const auto g = static_cast<double>(x[i]);
    squares[i] = g * g;
    finite = finite && std::isfinite(g);
    // Exact in float64 for narrower types.
    if constexpr (std::is_same_v<T, double>) low[i] = math::fma(g, g, -squares[i]);
  }
  if (!finite) {
    sum[0] = std::numeric_limits<double>::quiet_NaN();
    return;
  }
  add_values(sum, squares, n);
  if constexpr (std::is_same_v<T, double>) add_values(sum, low, n);
}

}  // namespace

void add_squares(ExactSum& sum, const Tensor& x) {
  std::mutex mutex;
  with_floating(x.dtype(), "add_squares", [&]<class T>(T) {
    const T* const data = x.data<T>();
    cpu::split(x.numel(), cpu::kGrain, [&](int64_t begin, int64_t end) {
      ExactSum own{};
      for (int64_t i = begin; i < end; i += kBlock) add_block(own, data + i, std::min(kBlock, end - i));
      const std::lock_guard lock(mutex);
      for (size_t bin = 0; bin < own.size(); ++bin) sum[bin] += own[bin];
    });
  });
}

double total(const ExactSum& sum) {
  double out = 0;
  for (size_t bin = sum.size(); bin-- > 0;) out += sum[bin];
  return out;
}

double exact_grad_norm(std::span<const FlatUnit> units) {
  ExactSum sum{};
  for (const FlatUnit& unit : units)
    if (unit.trainable()) add_squares(sum, unit.grads);
  return std::sqrt(total(sum));
}

}  // namespace tessera
