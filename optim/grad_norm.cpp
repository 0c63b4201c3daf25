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

// x points at element 0 of the block; only elements [begin, end) of it are there to be read.
template <class G>
double block_sum(const G* x, int64_t begin, int64_t end) {
  Lanes lanes{};
  if (begin == 0 && end == kNormBlock) {
    for (int64_t i = 0; i < kNormBlock; i += kLanes)
      for (int64_t l = 0; l < kLanes; ++l) {
        const double g = static_cast<double>(x[i + l]);
        lanes[static_cast<size_t>(l)] = math::fma(g, g, lanes[static_cast<size_t>(l)]);
      }
  } else {
    for (int64_t i = begin; i < end; ++i) {
      const double g = static_cast<double>(x[i]);
      double& lane = lanes[static_cast<size_t>(i % kLanes)];
      lane = math::fma(g, g, lane);
    }
  }
  for (size_t half = kLanes / 2; half > 0; half /= 2)
    for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

// Sums of the blocks of one slot, of which elements [begin, end) lie in the buffer; element 0 of the slot is at `slot`.
template <class G>
double slot_sum(const G* grads, int64_t slot, int64_t begin, int64_t end, double* sums) {
  const int64_t first = begin / kNormBlock, last = (end + kNormBlock - 1) / kNormBlock;
  cpu::parallel_for(last - first, cpu::kGrain / kNormBlock, [=](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; ++b) {
      const int64_t start = (first + b) * kNormBlock;
      sums[b] = block_sum(grads + slot + start, std::max(begin - start, int64_t{0}), std::min(end - start, kNormBlock));
    }
  });
  double sum = 0;
  for (int64_t b = 0; b < last - first; ++b) sum += sums[b];
  return sum;
}

}  // namespace

double sum_of_squares(std::span<const FlatUnit> units) {
  double sum = 0;
  for (const FlatUnit& unit : units) {
    const int64_t n = unit.grads.numel();
    const Tensor sums = unit.grads.make({n / kNormBlock + 2}, DType::float64, Category::workspace);
    with_floating(unit.grads.dtype(), "grad_norm", [&](auto type) {
      using G = decltype(type);
      for (const Slot& slot : unit.slots) {
        const int64_t begin = std::max(int64_t{0}, -slot.begin);
        const int64_t end = std::min(slot.shape.numel(), n - slot.begin);
        if (begin < end) sum += slot_sum(unit.grads.data<G>(), slot.begin, begin, end, sums.data<double>());
      }
    });
  }
  return sum;
}

double grad_norm(std::span<const FlatUnit> units) { return std::sqrt(sum_of_squares(units)); }

double clip_factor(double norm, double max_norm) {
  if (!(max_norm >= 0)) throw Error(fmt::format("[clip] clip is {}; expected a norm, or 0 for no clipping", max_norm));
  if (max_norm == 0) return 1;
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1 : factor;
}

}  // namespace tessera
