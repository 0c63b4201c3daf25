// RoPE frequencies, tables and rotation.
#include "tensor/ops/rotary.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>
#include <vector>

#include "tensor/cpu/loops.h"
#include "tensor/math.h"

namespace tessera {
namespace {

// Interpolation weight of pair j's unscaled frequency, before clamping to [0, 1].
double unscaled_weight(double frequency, int64_t j, int64_t head_dim, const RotaryOptions& o) {
  if (o.scaling == RopeScaling::none || o.scaling == RopeScaling::linear) return 0;
  const double full = static_cast<double>(o.original_context) / (2 * std::numbers::pi);  // rotations at 1 rad per token
  if (o.scaling == RopeScaling::llama3)
    return (frequency * full - o.low_freq_factor) / (o.high_freq_factor - o.low_freq_factor);
  const auto d = static_cast<double>(head_dim);
  const auto pair_index = [&](double turns) { return d * std::log(full / turns) / (2 * std::log(o.theta)); };
  const double first = std::max(std::floor(pair_index(o.high_freq_factor)), 0.0),
               last = std::min(std::ceil(pair_index(o.low_freq_factor)), d - 1);
  return 1 - (static_cast<double>(j) - first) / (first == last ? 0.001 : last - first);
}

// y may be x. Two loops, because a loop that stores two narrow arrays does not vectorize.
template <class T, class A>
void rotate_head(T* y, const T* x, const A* cosines, const A* sines, A sign, int64_t half) {
  constexpr int64_t kVecElems = 64;
  T first[kVecElems];
  for (int64_t from = 0; from < half; from += kVecElems) {
    const int64_t n = std::min(kVecElems, half - from);
    const T* const second = x + half + from;
    const A *const c = cosines + from, *const s = sines + from;
    T *const low = y + from, *const high = y + half + from;
    std::copy(x + from, x + from + n, first);
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j)
      low[j] = T(math::fma(static_cast<A>(first[j]), c[j], -(static_cast<A>(second[j]) * (sign * s[j]))));
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j)
      high[j] = T(math::fma(static_cast<A>(second[j]), c[j], static_cast<A>(first[j]) * (sign * s[j])));
  }
}

void rotate_on_cpu(const Tensor& y, const Tensor& x, const RopeArgs& rope) {
  with_floating(x.dtype(), "rotate", [&]<class T>(T) {
    const Rotation<T> f = make_rotation<T>(y, x, rope);
    const int64_t d = int64_t{2} * f.half;
    cpu::for_rows(f.rows, f.width, [&f, d](int64_t i) {
      const T* const from = f.x + i * f.width;
      T* const to = f.y + i * f.width;
      const Accumulate<T>* const row = f.angles(i);
      for (int64_t h = 0; h < f.heads; ++h) rotate_head(to + h * d, from + h * d, row, row + f.half, f.sign, f.half);
      if (to != from) std::copy(from + f.heads * d, from + f.width, to + f.heads * d);
    });
  });
}

}  // namespace

std::vector<double> rotary_frequencies(const RotaryOptions& options, int64_t head_dim) {
  std::vector<double> out;
  for (int64_t j = 0; j < head_dim / 2; ++j) {
    const double f = std::pow(options.theta, -2 * static_cast<double>(j) / static_cast<double>(head_dim));
    out.push_back(std::lerp(f / options.factor, f, std::clamp(unscaled_weight(f, j, head_dim, options), 0.0, 1.0)));
  }
  return out;
}

Tensor rotary_table(const RotaryOptions& options, int64_t positions, int64_t head_dim, DType dtype,
                    const ArenaPtr& arena) {
  Tensor table = Tensor::empty({positions, head_dim}, dtype, arena, Category::workspace);
  if (cpu::DryRun::here()) return table;
  const std::vector<double> frequencies = rotary_frequencies(options, head_dim);
  std::vector<double> values;
  values.reserve(static_cast<size_t>(positions * head_dim));
  for (int64_t p = 0; p < positions; ++p) {
    const double scale = options.attention_factor;
    for (const double f : frequencies) values.push_back(scale * std::cos(static_cast<double>(p) * f));
    for (const double f : frequencies) values.push_back(scale * std::sin(static_cast<double>(p) * f));
  }
  table.copy_from(Tensor::of<double>(values, table.shape(), arena->host()));
  return table;
}

namespace {

bool are_positions(const Tensor& p, const Tensor& x) {
  return p.dtype() == DType::int32 && (p.shape() == Shape{x.dim(1)} || p.shape() == Shape{x.dim(0), x.dim(1)});
}

}  // namespace

Tensor rotate(Tensor&& x_any, const RopeArgs& rope) {
  const int64_t d = rope.table.dim(1);
  if (x_any.ndim() != 3 || d % 2 != 0 || rope.heads < 0 || rope.heads * d > x_any.dim(2))
    throw Error("[rotate] x is " + x_any.describe() + "; expected (B, T, W) with " + std::to_string(rope.heads) +
                " heads of " + std::to_string(d) + " elements, an even number");
  const DType wide = accum_dtype(x_any.dtype());
  if (rope.table.dtype() != wide) throw Error("[rotate] the table is " + rope.table.describe());
  const int64_t tokens = x_any.dim(1);
  if (rope.positions.defined() ? !are_positions(rope.positions, x_any)
                               : rope.first < 0 || rope.first + tokens > rope.table.dim(0))
    throw Error("[rotate] " + std::to_string(tokens) + " tokens from position " + std::to_string(rope.first) +
                (rope.positions.defined() ? ", positions " + rope.positions.describe() : std::string()) +
                "; the table has " + std::to_string(rope.table.dim(0)) + " positions");
  Tensor x = x_any.contiguous();
  x_any = Tensor();
  Tensor y = x.unique() ? x : x.make(x.shape());
  RopeArgs args = rope;
  if (args.positions.defined()) args.positions = args.positions.contiguous();
  on_device(
      x.device(), [&] { rotate_on_cpu(y, x, args); }, [&] { cuda::rotate(y, x, args); });
  return y;
}

}  // namespace tessera
