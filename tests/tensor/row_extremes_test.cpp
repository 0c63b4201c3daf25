// Rows where a sum of exponentials or of squares goes wrong first: numbers that are far apart, also across the blocks
// that a row is read in, all equal, alone, at the row's ends; against plain loops in float64, on every device.

#include "tensor/ops/cross_entropy.h"
#include "tensor/ops/norm.h"
#include "tests/support/gpu.h"
#include "tests/support/one_thread.h"
#include "tests/support/plain_attention.h"

namespace tessera {
namespace {

using test::nearest_bf16;
using test::row_difference;
using Values = std::vector<double>;

double bound_of(DType dtype) { return dtype == DType::float64 ? 1e-11 : dtype == DType::float32 ? 2e-4 : 2e-2; }
Values doubles(const Tensor& t) { return t.to(DType::float64).to_vector<double>(); }

// Rows of n numbers that bfloat16 holds exactly: what lies at the ends and in the middle is far from the rest.
Values extreme_rows(int64_t n) {
  const Philox random = Philox::named(static_cast<uint64_t>(n), "rows");
  Values out;
  uint64_t at = 0;
  const auto row = [&](const std::function<double(int64_t)>& f) {
    for (int64_t j = 0; j < n; ++j) out.push_back(nearest_bf16(f(j)));
  };
  const auto normal = [&](int64_t) { return static_cast<double>(random.normal(at++)); };
  row(normal);
  for (const double all : {0.0, 1.0, -90.0, 1000.0}) row([&](int64_t) { return all; });
  for (const int64_t one : {int64_t{0}, n / 2, n - 1})
    for (const double by : {95.0, 1000.0, -1000.0}) row([&](int64_t j) { return normal(j) + (j == one ? by : 0); });
  row([&](int64_t j) { return normal(j) + (j < n / 2 ? -500 : 500); });
  row([&](int64_t j) { return normal(j) + (j < n / 2 ? 500 : -500); });
  row([&](int64_t j) { return 100 * static_cast<double>(j >> 10) + normal(j); });  // from block to block
  row([&](int64_t j) { return -100 * static_cast<double>(j >> 10) + normal(j); });
  row([&](int64_t j) { return 20 * normal(j); });
  return out;
}

struct Softmaxed {
  Values p, log_p, lse;
};
Softmaxed soften(const Values& x, int64_t n) {
  Softmaxed y;
  for (auto row = x.begin(); row != x.end(); row += n) {
    const double largest = *std::max_element(row, row + n);
    double sum = 0;
    for (auto v = row; v != row + n; ++v) sum += std::exp(*v - largest);
    y.lse.push_back(largest + std::log(sum));
    for (auto v = row; v != row + n; ++v) {
      y.log_p.push_back(*v - y.lse.back());
      y.p.push_back(std::exp(y.log_p.back()));
    }
  }
  return y;
}

Values normals(int64_t count, const char* name) {
  const Philox random = Philox::named(5, name);
  Values out;
  for (int64_t i = 0; i < count; ++i) out.push_back(nearest_bf16(random.normal(static_cast<uint64_t>(i))));
  return out;
}

Tensor tensor(const Values& values, const Shape& shape, DType dtype, const ArenaPtr& arena) {
  return Tensor::of<double>(values, shape, make_arena()).to(dtype).to(arena);
}

void expect_softmax(int64_t n, DType dtype, const ArenaPtr& arena) {
  const Values x = extreme_rows(n), dy = normals(std::ssize(x), "dy");
  const Shape shape{std::ssize(x) / n, n};
  const Softmaxed expected = soften(x, n);
  const Tensor in = tensor(x, shape, dtype, arena), out = softmax(in), log = log_softmax(in);
  EXPECT_LE(row_difference(doubles(out), expected.p, n, 1), bound_of(dtype)) << n;
  EXPECT_LE(row_difference(doubles(log), expected.log_p, n, 1e-3), bound_of(dtype)) << n;
  // From the forward's own results, which are stored as they are.
  const Values p = doubles(out), log_p = doubles(log);
  Values dx(x.size()), log_dx(x.size());
  for (size_t row = 0; row < x.size(); row += static_cast<size_t>(n)) {
    double dot = 0, sum = 0;
    for (size_t i = row; i < row + static_cast<size_t>(n); ++i) {
      dot += dy[i] * p[i];
      sum += dy[i];
    }
    for (size_t i = row; i < row + static_cast<size_t>(n); ++i) {
      dx[i] = p[i] * (dy[i] - dot);
      log_dx[i] = dy[i] - std::exp(log_p[i]) * sum;
    }
  }
  const Tensor seed = tensor(dy, shape, dtype, arena);
  EXPECT_LE(row_difference(doubles(softmax_backward(seed, out)), dx, n, 1), bound_of(dtype)) << n;
  EXPECT_LE(row_difference(doubles(log_softmax_backward(seed, log)), log_dx, n, 1), bound_of(dtype)) << n;
}

// Losses, and gradients by each of the ways; targets at the ends of a row, in its middle, and none.
void expect_cross_entropy(int64_t n, DType dtype, const ArenaPtr& arena) {
  const Values x = extreme_rows(n);
  const int64_t rows = std::ssize(x) / n;
  const Softmaxed expected = soften(x, n);
  std::vector<int32_t> targets;
  double loss = 0;
  Values dx = expected.p;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t target = i % 5 == 4 ? -1 : i % 5 == 3 ? (i * 7) % n : i % 3 == 0 ? 0 : i % 3 == 1 ? n - 1 : n / 2;
    targets.push_back(static_cast<int32_t>(target));
    if (target < 0)
      std::fill_n(dx.begin() + i * n, n, 0.0);
    else {
      loss -= expected.log_p[static_cast<size_t>(i * n + target)];
      dx[static_cast<size_t>(i * n + target)] -= 1;
    }
  }
  for (double& d : dx) d *= 0.5;
  const Shape shape{rows, n};
  const Tensor wanted = Tensor::of<int32_t>(targets, {rows}, arena);
  const double bound = bound_of(dtype), wide = dtype == DType::bfloat16 ? 2e-4 : bound;
  const CrossEntropy found = cross_entropy(tensor(x, shape, dtype, arena), wanted);
  EXPECT_NEAR(double{found.loss_sum}, loss, wide * (loss + 1)) << n;
  EXPECT_LE(row_difference(doubles(found.lse), expected.lse, 1, 1e-3), wide) << n;
  const Tensor back = cross_entropy_backward(tensor(x, shape, dtype, arena), wanted, found.lse, 0.5);
  EXPECT_LE(row_difference(doubles(back), dx, n, 1), bound) << n;
  Tensor logits = tensor(x, shape, dtype, arena);
  EXPECT_NEAR(double{cross_entropy_in_place(logits, wanted, 0.5).loss_sum}, loss, wide * (loss + 1)) << n;
  EXPECT_LE(row_difference(doubles(logits), dx, n, 1), bound) << n;
  // Put together of what ranks know of their parts.
  const Tensor all = tensor(x, shape, dtype, arena), most = row_max(all);
  const CrossEntropy joined =
      joined_cross_entropy(most, row_sum_exp(all, most), target_logits(all, wanted, {}), wanted);
  EXPECT_NEAR(double{joined.loss_sum}, loss, wide * (loss + 1)) << n;
}

void expect_norm(int64_t n, DType dtype, const ArenaPtr& arena) {
  for (const bool center : {true, false}) {
    const Values x = extreme_rows(n), gamma = normals(n, "gamma"), beta = normals(n, "beta"),
                 dy = normals(std::ssize(x), "dy");
    // A mean is rounded too, which is all that a row of equal numbers shows.
    const double bound = 5 * bound_of(dtype), of_mean = dtype == DType::float64 ? 0x1p-49 : 0x1p-20;
    Values y, dx, terms;
    const auto width = static_cast<double>(n);
    for (size_t row = 0; row < x.size(); row += static_cast<size_t>(n)) {
      double mean = 0, square = 0, sum = 0, dot = 0;
      for (int64_t j = 0; j < n && center; ++j) mean += x[row + static_cast<size_t>(j)];
      mean /= width;
      for (int64_t j = 0; j < n; ++j) square += std::pow(x[row + static_cast<size_t>(j)] - mean, 2) / width;
      const double rstd = 1 / std::sqrt(square + 1e-5);
      const auto normed = [&](size_t j) { return (x[row + j] - mean) * rstd; };
      for (size_t j = 0; j < static_cast<size_t>(n); ++j) {
        y.push_back(normed(j) * gamma[j] + (center ? beta[j] : 0));
        terms.push_back(std::abs(y.back()) + of_mean / bound * std::abs(mean) * rstd);
        sum += center ? dy[row + j] * gamma[j] / width : 0;
        dot += dy[row + j] * gamma[j] * normed(j) / width;
      }
      for (size_t j = 0; j < static_cast<size_t>(n); ++j)
        dx.push_back((dy[row + j] * gamma[j] - sum - normed(j) * dot) * rstd);
    }
    const Shape shape{std::ssize(x) / n, n}, channels{n};
    const Tensor in = tensor(x, shape, dtype, arena), by = tensor(gamma, channels, dtype, arena);
    const Normed found = norm(in, by, center ? tensor(beta, channels, dtype, arena) : Tensor(), {.center = center});
    EXPECT_LE(row_difference(doubles(found.y), y, n, 0.05, terms), bound) << n << (center ? "" : " by squares");
    const Tensor back = norm_backward(tensor(dy, shape, dtype, arena), in, by, found, Tensor());
    EXPECT_LE(row_difference(doubles(back), dx, n, 0.05), bound) << n << (center ? "" : " by squares");
  }
}

void expect_rows(const ArenaPtr& arena, const std::vector<int64_t>& sizes) {
  for (const DType dtype : test::floating(arena))
    for (const int64_t n : sizes) {
      SCOPED_TRACE(name_of(dtype));
      expect_softmax(n, dtype, arena);
      expect_cross_entropy(n, dtype, arena);
      if (n < 4096) expect_norm(n, dtype, arena);
    }
}

using RowExtremes = test::OneThread;

TEST_F(RowExtremes, AreThoseOfPlainLoops) {
  expect_rows(make_arena(), {1, 2, 3, 15, 16, 17, 64, 65, 1023, 1025, 4095, 4096, 4097, 8193});
}

using RowExtremesGpu = test::OnGpu;

TEST_F(RowExtremesGpu, AreThoseOfPlainLoops) { expect_rows(arena, {1, 2, 31, 33, 129, 1025, 4097}); }

// The head's loss by blocks of rows, the last of which has one, and of one row each.
TEST_F(RowExtremes, OfAHeadInBlocksAreThoseOfPlainLoops) {
  constexpr int64_t kRows = 7, kChannels = 3, kVocab = 4099;
  const ArenaPtr arena = make_arena();
  Values x = normals(kRows * kChannels, "x"), w = normals(kVocab * kChannels, "w");
  for (size_t i = 0; i < x.size(); i += kChannels) x[i] = 8;
  for (size_t j = 0; j < w.size(); j += kChannels) w[j] = j / kChannels % 5 == 0 ? 16 : j / kChannels < 4096 ? -16 : 32;
  Values logits;
  for (size_t i = 0; i < x.size(); i += kChannels)
    for (size_t j = 0; j < w.size(); j += kChannels)
      logits.push_back(x[i] * w[j] + x[i + 1] * w[j + 1] + x[i + 2] * w[j + 2]);
  const Softmaxed soft = soften(logits, kVocab);
  std::vector<int32_t> targets;
  double loss = 0;
  Values d = soft.p, dx(x.size()), dw(w.size());
  for (size_t i = 0; i < kRows; ++i) {
    targets.push_back(static_cast<int32_t>(i % 2 == 0 ? kVocab - 1 : 5 * i));
    const size_t at = i * kVocab + static_cast<size_t>(targets.back());
    loss -= soft.log_p[at];
    d[at] -= 1;
    for (size_t j = 0; j < kVocab; ++j)
      for (size_t c = 0; c < kChannels; ++c) {
        dx[i * kChannels + c] += d[i * kVocab + j] * w[j * kChannels + c];
        dw[j * kChannels + c] += d[i * kVocab + j] * x[i * kChannels + c];
      }
  }
  for (const DType dtype : {DType::float64, DType::float32})
    for (const int64_t block : {1, 2, 3, 7}) {
      const Tensor in = tensor(x, {kRows, kChannels}, dtype, arena),
                   table = tensor(w, {kVocab, kChannels}, dtype, arena);
      Tensor gx = in.make(in.shape()), gw = table.make(table.shape());
      gw.fill(0);
      const LinearCrossEntropy found = linear_cross_entropy(in, table, Tensor::of<int32_t>(targets, {kRows}, arena), 1,
                                                            &gx, &gw, {.rows = kRows, .block = block});
      EXPECT_NEAR(found.loss_sum, loss, bound_of(dtype) * loss) << block;
      EXPECT_LE(row_difference(doubles(gx), dx, kChannels, 0.5), bound_of(dtype)) << block;
      EXPECT_LE(row_difference(doubles(gw), dw, kChannels, 0.5), bound_of(dtype)) << block;
    }
}

}  // namespace
}  // namespace tessera
