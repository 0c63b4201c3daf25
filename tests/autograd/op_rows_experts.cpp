// Rows of the op table: the ops of a mixture of experts.
#include <numeric>

#include "autograd/experts/ops.h"
#include "tests/autograd/op_table.h"

namespace tessera::test {
namespace {

// Rows of one source or of several, some of them of nobody.
Problem draw_linear_rows(Random& random) {
  const int64_t in = random.between(1, 300), out = random.between(1, 90), weights = random.between(1, 4);
  std::vector<int64_t> counts;
  for (int64_t g = weights * random.between(1, 3); g > 0; --g)
    counts.push_back(random.between(0, 2) == 0 ? 0 : random.between(1, 20));
  counts.back() += 1;
  const int64_t rows = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  std::vector<Operand> operands{{Shape{rows, in}, -1, 1}};
  operands.resize(1 + static_cast<size_t>(weights), {Shape{out, in}, -1, 1});
  return {operands,
          [counts](const std::vector<Var>& v) {
            return linear_rows(v[0], {v.begin() + 1, v.end()}, counts);
          },
          [=](const Values& v) {
            std::vector<double> y;
            auto row = v[0].begin();
            for (size_t g = 0; g < counts.size(); ++g)
              for (int64_t r = 0; r < counts[g]; ++r, row += in)
                for (int64_t o = 0; o < out; ++o)
                  y.push_back(
                      std::inner_product(row, row + in, v[1 + g % static_cast<size_t>(weights)].begin() + o * in, 0.0));
            return y;
          }};
}

// Experts that multiply by 1, 2, 3, ...: from logits and x to the weighted sum.
Problem draw_mixture(Random& random) {
  const int64_t sequences = random.between(1, 3), length = random.between(1, 9), n = sequences * length,
                experts = random.between(1, 7), k = random.between(1, experts), c = random.one_of<int64_t>({1, 5, 300}),
                capacity = random.one_of<int64_t>({0, 0, 1, 3});
  const bool first = random.between(0, 1) == 1;
  const RouteOptions o{.per_token = k, .softmax_first = first, .sequences = sequences, .capacity = capacity};
  return {{{Shape{n, experts}}, {Shape{n, c}}},
          [o](const std::vector<Var>& v) {
            const RoutedVar r = route(v[0], o);
            std::vector<Var> parts = split_rows(dispatch_rows(v[1], r.routed), r.routed.counts);
            for (size_t e = 0; e < parts.size(); ++e) parts[e] = scale(parts[e], static_cast<double>(e) + 1);
            return combine_rows(join_rows(parts), r.weights, r.routed);
          },
          [=](const Values& v) {
            std::vector<double> y(static_cast<size_t>(n * c), 0);
            for (int64_t s = 0; s < sequences; ++s) {
              std::vector<std::vector<int64_t>> best;  // each token's experts by falling logits
              for (int64_t t = 0; t < length; ++t) {
                std::vector<int64_t> order(static_cast<size_t>(experts));
                std::iota(order.begin(), order.end(), 0);
                const double* const l = v[0].data() + (s * length + t) * experts;
                std::stable_sort(order.begin(), order.end(), [l](int64_t a, int64_t b) { return l[a] > l[b]; });
                best.push_back(order);
              }
              std::vector<int64_t> taken(static_cast<size_t>(experts), 0);
              for (int64_t j = 0; j < k; ++j)
                for (int64_t t = 0; t < length; ++t) {
                  const std::vector<int64_t>& order = best[static_cast<size_t>(t)];
                  const double* const l = v[0].data() + (s * length + t) * experts;
                  double sum = 0;
                  for (int64_t i = 0; i < (first ? experts : k); ++i) sum += std::exp(l[order[static_cast<size_t>(i)]]);
                  const int64_t e = order[static_cast<size_t>(j)];
                  if (capacity > 0 && taken[static_cast<size_t>(e)]++ >= capacity) continue;
                  for (int64_t i = 0; i < c; ++i) {
                    const auto at = static_cast<size_t>((s * length + t) * c + i);
                    y[at] += std::exp(l[e]) / sum * static_cast<double>(e + 1) * v[1][at];
                  }
                }
            }
            return y;
          }};
}

}  // namespace

void add_expert_rows(std::vector<OpRow>& table) {
  table.push_back({"linear_rows", draw_linear_rows});
  table.push_back({"mixture", draw_mixture});
}

}  // namespace tessera::test
