// GPTQ and round-to-nearest.
#include "tensor/ops/quantize/gptq.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/ops/matmul/matmul.h"

namespace tessera {
namespace {

constexpr int64_t kColumnBlock = 128;  // errors are propagated per block
constexpr int64_t kColumnTile = 512;   // columns updated at a time: a tile of U stays in the cache

size_t at(int64_t row, int64_t column, int64_t columns) { return static_cast<size_t>(row * columns + column); }

std::string shape_text(const Tensor& weight, const char* op) {
  return "[" + std::string(op) + "] weight " + weight.describe();
}

std::vector<double> to_doubles(const Tensor& weight, const char* op) {
  if (weight.ndim() != 2) throw Error(shape_text(weight, op) + "; expected (out, in)");
  const std::vector<float> values = weight.to_vector<float>();
  if (!std::ranges::all_of(values, [](float v) { return std::isfinite(v); }))
    throw Error(shape_text(weight, op) + ": an element is not finite");
  return {values.begin(), values.end()};
}

Half quantization_scale(const double* w, int64_t n) {
  double largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(w[i]));
  constexpr double kSmallest = 0x1p-24;  // smallest positive float16, so that a group of zeros has a scale
  return to_half(static_cast<float>(std::max(2 * largest / 15, kSmallest)));
}

int quantized_code(double w, double scale) {
  return static_cast<int>(std::clamp(std::nearbyint(w / scale) + Int4Matrix::kZero, 0.0, 15.0));
}

void check_scales(const Int4Matrix& m, const Tensor& weight, const char* op) {
  for (const Half h : m.scales)
    if (!std::isfinite(wide(h))) throw Error(shape_text(weight, op) + ": a scale exceeds the range of float16");
}

// U of H^-1 = U^T U, in place. H = R R^T with R upper triangular gives U = R^-1 without computing H^-1.
std::vector<double> factor(std::vector<double> h, int64_t n) {
  std::vector<double> column(static_cast<size_t>(n));
  for (int64_t j = n - 1; j >= 0; --j) {
    const double root = std::sqrt(h[at(j, j, n)]);
    if (!(root > 0)) throw Error("[gptq] the Hessian of the inputs is not positive definite; increase the damping");
    h[at(j, j, n)] = root;
    for (int64_t i = 0; i < j; ++i) column[static_cast<size_t>(i)] = h[at(i, j, n)] /= root;
    const double* const r = column.data();
    cpu::parallel_for(j, std::max<int64_t>(1, 8 * cpu::kGrain / (j + 1)), [&h, r, j, n](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        double* const row = h.data() + i * n;
        const double x = r[i];
        for (int64_t k = i; k < j; ++k) row[k] -= x * r[k];
      }
    });
  }
  std::vector<double> u(h.size(), 0.0);
  cpu::parallel_for(n, 64, [&h, &u, n](int64_t begin, int64_t end) {
    for (int64_t i = end - 1; i >= 0; --i) {
      double* const row = u.data() + i * n;
      if (i >= begin) row[i] = 1;
      for (int64_t k = i + 1; k < end; ++k) {
        const double x = h[at(i, k, n)];
        const double* const below = u.data() + k * n;
        for (int64_t c = std::max(k, begin); c < end; ++c) row[c] -= x * below[c];
      }
      const double root = h[at(i, i, n)];
      for (int64_t c = std::max(i, begin); c < end; ++c) row[c] /= root;
    }
  });
  return u;
}

std::vector<double> damped(const InputSquares& inputs, double damping) {
  const int64_t n = inputs.columns();
  std::vector<double> h = inputs.values();
  double mean = 0;
  for (int64_t i = 0; i < n; ++i) mean += h[at(i, i, n)] / static_cast<double>(n);
  if (!std::isfinite(mean)) throw Error("[gptq] the inputs are not finite");
  const double added = mean > 0 ? damping * mean : 1;
  for (int64_t i = 0; i < n; ++i) h[at(i, i, n)] += added;
  return h;
}

}  // namespace

InputSquares::InputSquares(int64_t columns) : columns_(columns), values_(static_cast<size_t>(columns * columns), 0.0) {}

void InputSquares::add(const Tensor& x) {
  if (x.ndim() < 1 || x.dim(x.ndim() - 1) != columns_)
    throw Error("[gptq] inputs " + x.describe() + "; expected (..., " + std::to_string(columns_) + ")");
  const Tensor rows = x.on_host().contiguous().flat_rows().to(DType::float32);
  Tensor products = rows.make({columns_, columns_}, DType::float32, Category::workspace);
  linear_weight_grad(products, rows, rows);
  const float* const from = products.data<float>();
  for (size_t i = 0; i < values_.size(); ++i) values_[i] += 2 * static_cast<double>(from[i]);
}

Int4Matrix round_to_nearest(const Tensor& weight, int64_t group) {
  const std::vector<double> w = to_doubles(weight, "round");
  Int4Matrix out(weight.dim(0), weight.dim(1), group);
  for (int64_t row = 0; row < out.rows; ++row)
    for (int64_t c = 0; c < out.columns; ++c) {
      const double* const from = w.data() + at(row, c, out.columns);
      Half& scale = out.scale(row, c / group);
      if (c % group == 0) scale = quantization_scale(from, std::min(group, out.columns - c));
      out.set_code(row, c, quantized_code(*from, wide(scale)));
    }
  check_scales(out, weight, "round");
  return out;
}

Int4Matrix gptq(const Tensor& weight, const InputSquares& inputs, int64_t group, double damping) {
  std::vector<double> w = to_doubles(weight, "gptq");
  Int4Matrix out(weight.dim(0), weight.dim(1), group);
  const int64_t n = out.columns;
  if (inputs.columns() != n)
    throw Error(shape_text(weight, "gptq") + "; expected " + std::to_string(inputs.columns()) + " columns");
  const std::vector<double> u = factor(damped(inputs, damping), n);
  // All errors of preceding columns must be propagated before a group begins.
  const int64_t block = group >= kColumnBlock ? group : kColumnBlock / group * group;
  for (int64_t first = 0; first < n; first += block) {
    const int64_t last = std::min(first + block, n), width = last - first;
    std::vector<double> losses(static_cast<size_t>(out.rows * width));
    cpu::parallel_for(out.rows, 8, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        double *const from = w.data() + row * n, *const lost = losses.data() + row * width;
        for (int64_t j = first; j < last; ++j) {
          Half& half = out.scale(row, j / group);
          if (j % group == 0) half = quantization_scale(from + j, std::min(group, n - j));
          const double scale = wide(half);
          const int code = quantized_code(from[j], scale);
          out.set_code(row, j, code);
          const double* const factors = u.data() + j * n;
          const double e = (from[j] - scale * (code - Int4Matrix::kZero)) / factors[j];
          lost[j - first] = e;
          for (int64_t k = j + 1; k < last; ++k) from[k] -= e * factors[k];
        }
      }
      for (int64_t tile = last; tile < n; tile += kColumnTile)
        for (int64_t row = begin; row < end; ++row) {
          double* const to = w.data() + row * n;
          for (int64_t j = first; j < last; ++j) {
            const double e = losses[at(row, j - first, width)];
            const double* const factors = u.data() + j * n;
            for (int64_t k = tile; k < std::min(tile + kColumnTile, n); ++k) to[k] -= e * factors[k];
          }
        }
    });
  }
  check_scales(out, weight, "gptq");
  return out;
}

double output_error(const Tensor& weight, const Int4Matrix& rounded, const InputSquares& inputs) {
  const std::vector<double> w = to_doubles(weight, "output_error");
  const int64_t rows = rounded.rows, n = rounded.columns;
  if (weight.shape() != Shape{rows, n} || inputs.columns() != n)
    throw Error(shape_text(weight, "output_error") +
                "; expected the shape of its codes, with as many columns as the inputs");
  std::vector<double> lost(static_cast<size_t>(rows)), full(lost);
  cpu::parallel_for(rows, 8, [&](int64_t begin, int64_t end) {
    std::vector<float> decoded(static_cast<size_t>(n));
    std::vector<double> difference(decoded.size()), sums(decoded.size());
    const auto form = [&](const double* x) {
      std::ranges::fill(sums, 0.0);
      for (int64_t i = 0; i < n; ++i) {
        const double* const h = inputs.values().data() + i * n;
        for (int64_t k = 0; k < n; ++k) sums[static_cast<size_t>(k)] += x[i] * h[k];
      }
      double total = 0;
      for (int64_t k = 0; k < n; ++k) total += x[k] * sums[static_cast<size_t>(k)];
      return total;
    };
    for (int64_t row = begin; row < end; ++row) {
      const double* const from = w.data() + row * n;
      rounded.decode(row * n, decoded);
      for (size_t k = 0; k < decoded.size(); ++k) difference[k] = from[k] - static_cast<double>(decoded[k]);
      lost[static_cast<size_t>(row)] = form(difference.data());
      full[static_cast<size_t>(row)] = form(from);
    }
  });
  double error = 0, all = 0;
  for (size_t row = 0; row < lost.size(); ++row) error += lost[row], all += full[row];
  return all > 0 ? error / all : 0;
}

}  // namespace tessera
