// Muon compared with its paper in float64, with plain loops for every matmul.
#include "optim/muon.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "optim/optimizer.h"
#include "tensor/ops/matmul/cuda/gemm.h"
#include "tests/support/gpu.h"
#include "tests/support/units.h"

namespace tessera {
namespace {

using Matrix = std::vector<std::vector<double>>;

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix out(a.size(), std::vector<double>(b[0].size(), 0));
  for (size_t i = 0; i < a.size(); ++i)
    for (size_t k = 0; k < b.size(); ++k)
      for (size_t j = 0; j < b[0].size(); ++j) out[i][j] += a[i][k] * b[k][j];
  return out;
}

Matrix transposed(const Matrix& a) {
  Matrix out(a[0].size(), std::vector<double>(a.size()));
  for (size_t i = 0; i < a.size(); ++i)
    for (size_t j = 0; j < a[0].size(); ++j) out[j][i] = a[i][j];
  return out;
}

// As published: on the transpose if there are more rows than columns.
Matrix newton_schulz(Matrix x) {
  const bool tall = x.size() > x[0].size();
  if (tall) x = transposed(x);
  double sum = 0;
  for (const auto& row : x)
    for (const double e : row) sum += e * e;
  for (auto& row : x)
    for (double& e : row) e /= std::sqrt(sum) + 1e-7;
  for (int step = 0; step < 5; ++step) {
    const Matrix a = product(x, transposed(x)), a2 = product(a, a);
    Matrix b = a;
    for (size_t i = 0; i < a.size(); ++i)
      for (size_t j = 0; j < a.size(); ++j) b[i][j] = -4.7750 * a[i][j] + 2.0315 * a2[i][j];
    const Matrix bx = product(b, x);
    for (size_t i = 0; i < x.size(); ++i)
      for (size_t j = 0; j < x[0].size(); ++j) x[i][j] = 3.4445 * x[i][j] + bx[i][j];
  }
  return tall ? transposed(x) : x;
}

Matrix make_matrix(const double* from, int64_t rows, int64_t columns) {
  Matrix out;
  for (int64_t r = 0; r < rows; ++r) out.emplace_back(from + r * columns, from + (r + 1) * columns);
  return out;
}

// A unit of one matrix, whose first `top` rows, if any, are a separate matrix.
FlatUnit matrix_unit(int64_t rows, int64_t columns, int64_t top, DType dtype) {
  static std::deque<Parameter> all;  // units outlive their creators
  Parameter& p = all.emplace_back();
  p.name = "w";
  p.full_shape = {rows, columns};
  p.decays = p.full_matrix_update = true;
  if (top > 0) p.rows = {top, rows - top};
  p.var = Var(Tensor::meta(p.full_shape, dtype), true);
  const auto buffer = [&] { return Tensor::empty({rows * columns}, dtype, make_arena(), Category::parameters); };
  return {"u (matrices)", buffer(), buffer(), {{&p, 0, rows * columns}}};
}

void expect_matches_paper(int64_t rows, int64_t columns, int64_t top, DType dtype, double bound,
                          const ArenaPtr& arena) {
  SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(columns));
  const FlatUnit here = matrix_unit(rows, columns, top, dtype);
  test::fill_normal(here, here.values, 1, 0.1);
  FlatUnit unit = here;
  unit.values = unit.values.to(arena);
  unit.grads = unit.grads.to(arena);
  constexpr double kMomentum = 0.95, kDecay = 0.1, kScale = 0.5;
  const auto optimizer = make_optimizer(OptimizerKind::muon, {unit}, {.momentum = kMomentum, .weight_decay = kDecay});
  std::vector<double> p = unit.values.to(DType::float64).to_vector<double>(), m(p.size(), 0);
  for (int t = 1; t <= 3; ++t) {
    test::fill_normal(here, here.grads, 100 + static_cast<uint64_t>(t), 0.3);
    unit.grads.copy_from(here.grads);
    const std::vector<double> g = unit.grads.to(DType::float64).to_vector<double>();
    const double lr = 0.01 * t;
    optimizer->step(lr, kScale);
    std::vector<double> u(g.size());
    for (size_t i = 0; i < g.size(); ++i) {
      m[i] = kMomentum * m[i] + kScale * g[i];
      u[i] = kScale * g[i] + kMomentum * m[i];
    }
    const auto update = [&](int64_t first, int64_t count) {
      const Matrix o = newton_schulz(make_matrix(u.data() + first * columns, count, columns));
      const double factor = 0.2 * std::sqrt(static_cast<double>(std::max(count, columns)));
      for (int64_t i = 0; i < count * columns; ++i) {
        double& e = p[static_cast<size_t>(first * columns + i)];
        e = e * (1 - lr * kDecay) - lr * factor * o[static_cast<size_t>(i / columns)][static_cast<size_t>(i % columns)];
      }
    };
    if (top > 0) update(0, top);
    update(top, rows - top);
  }
  const std::vector<double> found = optimizer->masters()[0].to(DType::float64).to_vector<double>();
  for (size_t i = 0; i < p.size(); ++i) ASSERT_NEAR(found[i], p[i], bound * (1 + std::abs(p[i]))) << i;
}

void expect_matches_paper(const ArenaPtr& arena) {
  for (const auto& [rows, columns, top] :
       {std::tuple{8, 8, 0}, {5, 12, 0}, {12, 5, 0}, {24, 8, 16}, {1, 7, 0}, {48, 16, 32}, {40, 31, 0}}) {
    if (test::has_kernels(DType::float64, arena->device()))
      expect_matches_paper(rows, columns, top, DType::float64, 1e-11, arena);
    for (const DType dtype : {DType::float32, DType::bfloat16})
      expect_matches_paper(rows, columns, top, dtype, 2e-5, arena);
  }
}

TEST(Muon, UpdatesMatchPaper) { expect_matches_paper(make_arena()); }

using MuonGpu = test::OnGpu;
TEST_F(MuonGpu, UpdatesMatchPaper) { expect_matches_paper(arena); }

// Memory in addition to the matrix and library workspaces; the emulated library has none.
TEST_F(MuonGpu, StaysWithinPredictedMemory) {
  const int64_t library = test::emulated() ? 0 : cuda::kMaxWorkspace;
  for (const auto& [rows, columns] : {std::pair{64, 64}, {64, 256}, {129, 35}, {37, 301}}) {
    Tensor x = Tensor::empty({rows, columns}, DType::float32, arena);
    x.fill(0.5);
    const int64_t upper_bound = arena->total().live + orthogonalise_bytes(rows, columns, 4, Device::cuda) + library;
    arena->reset_peaks();
    orthogonalise(x);
    EXPECT_LE(arena->total().peak, upper_bound);
  }
}

// Singular values end near 1, within the polynomial's range.
TEST(Muon, OrthogonalizesMatrices) {
  const FlatUnit unit = matrix_unit(16, 40, 0, DType::float64);
  test::fill_normal(unit, unit.values, 3, 5.0);
  const Tensor x = unit.values.reshape({16, 40});
  orthogonalise(x);
  const Matrix o = make_matrix(x.data<double>(), 16, 40), gram = product(o, transposed(o));
  double trace = 0;
  for (size_t i = 0; i < gram.size(); ++i) {
    EXPECT_GT(gram[i][i], 0.4);
    EXPECT_LT(gram[i][i], 1.5);
    trace += gram[i][i];
  }
  EXPECT_NEAR(trace / 16, 0.8, 0.3);
}

TEST(Muon, MapsZeroToZero) {
  const Tensor x = Tensor::zeros({4, 6}, DType::float32, make_arena());
  orthogonalise(x);
  for (const float e : x.to_vector<float>()) EXPECT_EQ(e, 0);
}

}  // namespace
}  // namespace tessera
