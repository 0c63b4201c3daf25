// Muon's operations on full matrices, between its two elementwise passes.
#include "optim/muon.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "optim/grad_norm.h"
#include "optim/rules.h"
#include "tensor/cpu/loops.h"
#include "tensor/ops/elementwise.h"
#include "tensor/ops/matmul/matmul.h"

namespace tessera {
namespace {

// Polynomial of Jordan et al., with the maximum slope at 0 for five steps.
constexpr std::array kPolynomial = {3.4445, -4.7750, 2.0315};
constexpr int kSteps = 5;
constexpr double kEps = 1e-7;       // added to the norm before division
constexpr double kAdamWSize = 0.2;  // typical root mean square of AdamW's updates

void normalise(const Tensor& x) {
  const Tensor square = sums_of_squares(std::span(&x, 1));
  const auto on_cpu = [&] {
    Tensor same = x;
    scale_(same, 1 / (std::sqrt(*square.data<double>()) + kEps));
  };
  on_device(x.device(), on_cpu, [&] { cuda::normalise(x, square, kEps); });
}

void blend(const Tensor& y, const Tensor& x, double a, double b) {
  const auto on_cpu = [&] {
    with_wide(y, [&]<class W>(W) {
      const W wa = static_cast<W>(a), wb = static_cast<W>(b);
      cpu::map<W, W, W>([=](W u, W v) { return math::fma(wa, u, wb * v); }, y, x, y);
    });
  };
  on_device(y.device(), on_cpu, [&] { cuda::blend(y, x, a, b); });
}

}  // namespace

void orthogonalise(const Tensor& x) {
  const int64_t rows = x.dim(0), columns = x.dim(1), n = std::min(rows, columns);
  const bool wide = rows <= columns;
  normalise(x);
  const auto allocate = [&](int64_t r, int64_t c) { return x.make({r, c}, x.dtype(), Category::workspace); };
  Tensor gram = allocate(n, n), polynomial = allocate(n, n), next = allocate(rows, columns);
  for (int step = 0; step < kSteps; ++step) {
    matmul_into(gram, wide ? x : x.transpose(0, 1), wide ? x.transpose(0, 1) : x);
    matmul_into(polynomial, gram, gram);
    blend(polynomial, gram, kPolynomial[1], kPolynomial[2]);
    matmul_into(next, wide ? polynomial : x, wide ? x : polynomial);
    blend(x, next, 1, kPolynomial[0]);
  }
}

int64_t orthogonalise_bytes(int64_t rows, int64_t columns, int64_t element, Device device) {
  const int64_t n = std::min(rows, columns), own = rows * columns + 2 * n * n;
  if (device == Device::cpu) return (own + 2 * rows * columns) * element;
  const auto up = [](int64_t size) { return (size + 7) / 8 * 8; };  // a GEMM may pad copies of all three operands
  return (own + up(n) * up(n) + 2 * up(rows) * up(columns)) * element;
}

void make_matrix_update(const Parameter& p, const Tensor& full) {
  const int64_t rows = p.full_shape[0], columns = p.full_shape[1];
  const std::vector<int64_t> matrix_rows = p.rows.empty() ? std::vector<int64_t>{rows} : p.rows;
  int64_t first = 0;
  for (const int64_t count : matrix_rows) {
    Tensor matrix = full.narrow(0, first, count);
    orthogonalise(matrix);
    scale_(matrix, kAdamWSize * std::sqrt(static_cast<double>(std::max(count, columns))));
    first += count;
  }
}

void make_updates(const std::vector<FlatUnit>& units, const std::vector<Tensor>& updates) {
  for (size_t u = 0; u < units.size(); ++u)
    for (const Slot& slot : units[u].slots)
      if (updates[u].defined()) make_matrix_update(*slot.parameter, slot.full_view(updates[u]));
}

}  // namespace tessera
