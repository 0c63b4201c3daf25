// Gradient norm with a fixed summation order.
#include "optim/grad_norm.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "tensor/cpu/vectorize.h"
#include "tensor/math.h"

namespace tessera {
namespace {

constexpr int64_t kLanes = 16;

using Lanes = std::array<double, kLanes>;

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

void block_sums_on_cpu(const Tensor& grads, double* sums) {
  const int64_t n = grads.numel();
  with_floating(grads.dtype(), "grad_norm", [&]<class G>(G) {
    const G* const x = grads.data<G>();
    cpu::parallel_for(norm_blocks(n), cpu::kGrain / kNormBlock, [=](int64_t from, int64_t to) {
      for (int64_t b = from; b < to; ++b)
        sums[b] = block_sum(x + b * kNormBlock, std::min(kNormBlock, n - b * kNormBlock));
    });
  });
}

double run_sum(const double* x, const BlockRun& run) {
  OrderedSum sum;
  for (int64_t t = 0; t < run.times; ++t)
    for (int64_t i = 0; i < run.count; ++i) sum.add(x[run.begin + t * run.stride + i]);
  return sum.total();
}

}  // namespace

void block_sums(const Tensor& grads, const Tensor& sums) {
  sums.check_size(norm_blocks(grads.numel()));
  on_device(
      grads.device(), [&] { block_sums_on_cpu(grads, sums.data<double>()); }, [&] { cuda::block_sums(grads, sums); });
}

void ordered_sums(const Tensor& sums, std::span<const BlockRun> runs, const Tensor& out) {
  out.check_size(static_cast<int64_t>(runs.size()));
  const auto on_cpu = [&] {
    for (size_t i = 0; i < runs.size(); ++i) out.data<double>()[i] = run_sum(sums.data<double>(), runs[i]);
  };
  on_device(sums.device(), on_cpu, [&] { cuda::ordered_sums(sums, runs, out); });
}

Tensor sums_of_squares(std::span<const Tensor> tensors) {
  const auto defined = [](const Tensor& t) { return t.defined(); };
  if (tensors.empty() || !std::ranges::all_of(tensors, defined))
    throw Error("[sums_of_squares] tensors: expected at least one, all of them defined");
  const auto on_cpu = [&] {
    Tensor out = tensors[0].make({static_cast<int64_t>(tensors.size())}, DType::float64, Category::workspace);
    for (size_t i = 0; i < tensors.size(); ++i) {
      const BlockRun run{.count = norm_blocks(tensors[i].numel())};
      const Tensor sums = out.make({run.count}, DType::float64, Category::workspace);
      block_sums(tensors[i], sums);
      out.data<double>()[i] = run_sum(sums.data<double>(), run);
    }
    return out;
  };
  return on_device(tensors[0].device(), on_cpu, [&] { return cuda::sums_of_squares(tensors); });
}

double sum_of_squares(std::span<const FlatUnit> units) {
  std::vector<Tensor> grads;
  for (const FlatUnit& unit : units)
    if (unit.trainable()) grads.push_back(unit.grads);
  if (grads.empty()) return 0;
  OrderedSum all;
  for (const double sum : sums_of_squares(grads).to_vector<double>()) all.add(sum);
  return all.total();
}

double grad_norm(std::span<const FlatUnit> units) { return std::sqrt(sum_of_squares(units)); }

double clip_factor(double norm, double max_norm) {
  if (!(max_norm >= 0)) throw Error(fmt::format("[clip] expected a norm, or 0 for no clipping, got {}", max_norm));
  return clipped(norm, max_norm);
}

}  // namespace tessera
