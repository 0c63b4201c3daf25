// Rows of the op table: norms, softmax, GELU with bias, embedding, dropout, cross-entropy.
#include <cmath>

#include "tests/autograd/op_table.h"

namespace tessera::test {
namespace {

// Row i of length n of a flat vector.
std::vector<double> row_of(const std::vector<double>& v, size_t i, size_t n) {
  return {v.begin() + static_cast<std::ptrdiff_t>(i * n), v.begin() + static_cast<std::ptrdiff_t>((i + 1) * n)};
}

Shape rows_shape(Random& random) {
  // Now and then enough rows for several threads.
  return {random.between(0, 4) == 0 ? random.between(200, 400) : random.between(1, 9),
          random.one_of<int64_t>({1, 2, 7, 16, 33, 64, 130})};
}

std::vector<double> norm_rows(const std::vector<double>& x, const std::vector<double>& gamma,
                              const std::vector<double>* beta) {
  const size_t n = gamma.size();
  std::vector<double> y;
  for (size_t i = 0; i < x.size() / n; ++i) {
    const std::vector<double> row = row_of(x, i, n);
    double mean = 0, square = 0;
    for (const double v : row) mean += v / static_cast<double>(n);
    if (!beta) mean = 0;
    for (const double v : row) square += (v - mean) * (v - mean) / static_cast<double>(n);
    for (size_t j = 0; j < n; ++j)
      y.push_back((row[j] - mean) / std::sqrt(square + 1e-5) * gamma[j] + (beta ? (*beta)[j] : 0));
  }
  return y;
}

Problem draw_layer_norm(Random& random) {
  Shape s = rows_shape(random);
  s[1] = std::max<int64_t>(s[1], 3);
  const Shape c{s[1]};
  return {{{s, -2, 3}, {c, 0.5, 1.5}, {c}},
          [](const std::vector<Var>& v) { return norm(v[0], v[1], v[2]); },
          [](const Values& v) { return norm_rows(v[0], v[1], &v[2]); },
          true};
}

Problem draw_rms_norm(Random& random) {
  Shape s = rows_shape(random);
  s[1] = std::max<int64_t>(s[1], 3);  // a row of one element bends too sharply near 0 for finite differences
  const Shape c{s[1]};
  return {{{s, -2, 3}, {c, 0.5, 1.5}},
          [](const std::vector<Var>& v) { return norm(v[0], v[1], Var(), {.center = false}); },
          [](const Values& v) { return norm_rows(v[0], v[1], nullptr); },
          true};
}

Problem draw_add_norm(Random& random) {
  Shape s = rows_shape(random);
  s[1] = std::max<int64_t>(s[1], 3);
  const Shape c{s[1]};
  const bool centered = random.between(0, 1) == 1;
  // Both outputs are used, and y is a fresh result that may be written over.
  return {{{s}, {s, 1, 3}, {c, 0.5, 1.5}, {c}},
          [centered](const std::vector<Var>& v) {
            const Var beta = centered ? v[3] : Var();
            auto [sum, normed] = add_norm(v[0], scale(v[1], 1), v[2], beta, {.center = centered});
            const Var both = add(sum, normed);
            return centered ? both : both + v[3];
          },
          [centered](const Values& v) {
            std::vector<double> sum = v[0];
            for (size_t i = 0; i < sum.size(); ++i) sum[i] += v[1][i];
            std::vector<double> y = norm_rows(sum, v[2], centered ? &v[3] : nullptr);
            for (size_t i = 0; i < y.size(); ++i) y[i] += sum[i] + (centered ? 0 : v[3][i % v[3].size()]);
            return y;
          },
          true};
}

std::vector<double> softmax_rows(const std::vector<double>& x, size_t n, bool log) {
  std::vector<double> y;
  for (size_t i = 0; i < x.size() / n; ++i) {
    const std::vector<double> row = row_of(x, i, n);
    double sum = 0;
    for (const double v : row) sum += std::exp(v);
    for (const double v : row) y.push_back(log ? v - std::log(sum) : std::exp(v) / sum);
  }
  return y;
}

template <bool kLog>
Problem draw_softmax(Random& random) {
  const Shape s = rows_shape(random);
  return {{{s, -4, 4}},
          [](const std::vector<Var>& v) { return kLog ? log_softmax(v[0]) : softmax(v[0]); },
          [n = static_cast<size_t>(s[1])](const Values& v) { return softmax_rows(v[0], n, kLog); },
          true};
}

double gelu_of(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

Problem draw_bias_gelu(Random& random) {
  const Shape s = random.between(0, 2) == 0 ? Shape{3, 700} : rows_shape(random);
  const bool recompute = random.between(0, 1) == 1;
  return {{{s}, {Shape{s[1]}}},
          [recompute](const std::vector<Var>& v) { return bias_gelu(scale(v[0], 1), v[1], recompute); },
          [](const Values& v) {
            std::vector<double> y;
            for (size_t i = 0; i < v[0].size(); ++i) y.push_back(gelu_of(v[0][i] + v[1][i % v[1].size()]));
            return y;
          },
          true};
}

Problem draw_swiglu(Random& random) {
  const Shape half = rows_shape(random);
  const bool recompute = random.between(0, 1) == 1;
  return {{{Shape{half[0], 2 * half[1]}, -4, 4}},
          [recompute](const std::vector<Var>& v) { return swiglu(v[0], recompute); },
          [f = static_cast<size_t>(half[1])](const Values& v) {
            std::vector<double> y;
            for (size_t i = 0; i < v[0].size() / (2 * f); ++i)
              for (size_t j = 0; j < f; ++j) {
                const double gate = v[0][2 * i * f + j];
                y.push_back(gate / (1 + std::exp(-gate)) * v[0][(2 * i + 1) * f + j]);
              }
            return y;
          },
          true};
}

std::vector<double> linear_rows(const std::vector<double>& x, const std::vector<double>& w,
                                const std::vector<double>& b) {
  const size_t out = b.size(), in = w.size() / out;
  std::vector<double> y;
  for (size_t i = 0; i < x.size() / in; ++i)
    for (size_t j = 0; j < out; ++j) {
      double sum = b[j];
      for (size_t k = 0; k < in; ++k) sum += x[i * in + k] * w[j * in + k];
      y.push_back(sum);
    }
  return y;
}

Problem draw_gelu_mlp(Random& random) {
  const int64_t rows = random.between(1, 40), in = random.one_of<int64_t>({1, 5, 16}),
                hidden = random.one_of<int64_t>({1, 8, 24}), out = random.one_of<int64_t>({1, 7, 16});
  const bool recompute = random.between(0, 1) == 1;
  return {{{Shape{rows, in}}, {Shape{hidden, in}}, {Shape{hidden}}, {Shape{out, hidden}}, {Shape{out}}},
          [recompute](const std::vector<Var>& v) {
            return gelu_mlp(v[0], {.w = v[1], .b = v[2]}, {.w = v[3], .b = v[4]}, recompute);
          },
          [](const Values& v) {
            std::vector<double> h = linear_rows(v[0], v[1], v[2]);
            for (double& x : h) x = gelu_of(x);
            return linear_rows(h, v[3], v[4]);
          },
          false,
          true};
}

Tensor draw_ids(Random& random, const Shape& shape, int64_t below, const ArenaPtr& arena) {
  Tensor ids = Tensor::empty(shape, DType::int32, arena);
  for (int64_t i = 0; i < ids.numel(); ++i) ids.data<int32_t>()[i] = static_cast<int32_t>(random.between(0, below - 1));
  return ids;
}

Problem draw_embedding(Random& random) {
  const Shape table{random.between(2, 40), random.between(1, 130)};
  const Tensor ids = draw_ids(random, {random.between(1, 4), random.between(1, 20)}, table[0], make_arena());
  return {{{table}},
          [ids](const std::vector<Var>& v) { return embedding(ids, v[0]); },
          [ids, table](const Values& v) {
            std::vector<double> y;
            for (const int32_t id : ids.to_vector<int32_t>())
              for (const double x : row_of(v[0], static_cast<size_t>(id), static_cast<size_t>(table[1])))
                y.push_back(x);
            return y;
          }};
}

Problem draw_dropout(Random& random) {
  const Shape s{random.between(1, 3), random.between(1, 7), random.between(1, 19)};
  const double p = random.one_of({0.0, 0.1, 0.5});
  DropoutTile tile;
  tile.random = Philox(77);
  tile.step = 5;
  tile.first_sequence = random.between(0, 9);
  return {{{s}},
          [=](const std::vector<Var>& v) { return dropout(scale(v[0], 1), p, tile); },
          [=](const Values& v) {
            std::vector<double> y = v[0];
            for (size_t i = 0; i < y.size(); ++i) {
              const uint64_t at = static_cast<uint64_t>(tile.first_sequence * s[1] * s[2]) + i;
              y[i] *= tile.random.uniform(at, tile.step) < static_cast<float>(p) ? 0 : 1 / (1 - p);
            }
            return y;
          }};
}

Problem draw_cross_entropy(Random& random) {
  const int64_t rows = random.between(1, 9), vocab = random.one_of<int64_t>({2, 17, 65, 4096, 4099, 9001});
  const Tensor targets = draw_ids(random, {rows}, vocab, make_arena());
  if (rows > 1) targets.data<int32_t>()[random.between(0, rows - 1)] = -1;
  return {{{Shape{rows, vocab}, -3, 3}},
          [targets](const std::vector<Var>& v) { return cross_entropy(scale(v[0], 1), targets, 0.25).mean; },
          [targets, vocab](const Values& v) {
            double total = 0;
            const std::vector<double> log_p = softmax_rows(v[0], static_cast<size_t>(vocab), true);
            for (int64_t i = 0; i < targets.numel(); ++i)
              if (const int32_t t = targets.data<int32_t>()[i]; t >= 0)
                total -= log_p[static_cast<size_t>(i * vocab + t)];
            return std::vector<double>{0.25 * total};
          }};
}

// More rows than a block has, as often as fewer; blocks that divide them and blocks that do not.
Problem draw_linear_cross_entropy(Random& random) {
  const int64_t rows = random.between(0, 1) == 0 ? random.between(1, 40) : random.between(65, 130);
  const int64_t channels = random.between(1, 20), vocab = random.one_of<int64_t>({2, 17, 65});
  const Tensor targets = draw_ids(random, {rows}, vocab, make_arena());
  for (int64_t i = 0; i < rows; i += 7) targets.data<int32_t>()[random.between(0, rows - 1)] = -1;
  return {
      {{Shape{rows, channels}, -1, 1}, {Shape{vocab, channels}, -1, 1}},
      [targets](const std::vector<Var>& v) { return linear_cross_entropy(v[0], v[1], targets, 0.25, nullptr, 1).mean; },
      [=](const Values& v) {
        const auto width = static_cast<size_t>(channels);
        std::vector<double> logits;
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t entry = 0; entry < vocab; ++entry) {
            double sum = 0;
            for (size_t c = 0; c < width; ++c)
              sum += v[0][static_cast<size_t>(r) * width + c] * v[1][static_cast<size_t>(entry) * width + c];
            logits.push_back(sum);
          }
        double total = 0;
        const std::vector<double> log_p = softmax_rows(logits, static_cast<size_t>(vocab), true);
        for (int64_t r = 0; r < rows; ++r)
          if (const int32_t t = targets.data<int32_t>()[r]; t >= 0) total -= log_p[static_cast<size_t>(r * vocab + t)];
        return std::vector<double>{0.25 * total};
      },
      false,
      true};
}

}  // namespace

void add_structured_rows(std::vector<OpRow>& table) {
  table.push_back({"layer_norm", draw_layer_norm});
  table.push_back({"rms_norm", draw_rms_norm});
  table.push_back({"add_norm", draw_add_norm});
  table.push_back({"softmax", draw_softmax<false>});
  table.push_back({"log_softmax", draw_softmax<true>});
  table.push_back({"bias_gelu", draw_bias_gelu});
  table.push_back({"swiglu", draw_swiglu});
  table.push_back({"gelu_mlp", draw_gelu_mlp});
  table.push_back({"embedding", draw_embedding});
  table.push_back({"dropout", draw_dropout});
  table.push_back({"cross_entropy", draw_cross_entropy});
  table.push_back({"linear_cross_entropy", draw_linear_cross_entropy});
}

}  // namespace tessera::test
