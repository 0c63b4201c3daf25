// Least squares without negative constants.
#include "planner/costs.h"

#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "tensor/error.h"

namespace tessera::planner {
namespace {

// Constants of `chosen` sizes alone, by the normal equations; nothing where they do not tell them apart.
std::optional<Cost> solve(const std::vector<Timed>& timed, unsigned chosen) {
  std::array<size_t, kSizes> of{};
  size_t n = 0;
  for (size_t i = 0; i < kSizes; ++i)
    if ((chosen >> i & 1U) != 0) of[n++] = i;
  std::array<std::array<double, kSizes + 1>, kSizes> a{};
  std::array<double, kSizes> unit{};  // so that all of them are of a size
  for (size_t i = 0; i < n; ++i) {
    for (const Timed& t : timed) unit[i] += std::pow(t.sizes[of[i]] / t.seconds, 2);
    unit[i] = std::sqrt(unit[i]);
    if (unit[i] == 0) return std::nullopt;
  }
  for (size_t i = 0; i < n; ++i)
    for (const Timed& t : timed) {
      const double x = t.sizes[of[i]] / t.seconds / unit[i];
      for (size_t j = 0; j < n; ++j) a[i][j] += x * t.sizes[of[j]] / t.seconds / unit[j];
      a[i][n] += x;
    }
  for (size_t i = 0; i < n; ++i) {
    size_t best = i;
    for (size_t j = i + 1; j < n; ++j)
      if (std::abs(a[j][i]) > std::abs(a[best][i])) best = j;
    std::swap(a[i], a[best]);
    if (std::abs(a[i][i]) < 1e-10) return std::nullopt;
    for (size_t j = 0; j < n; ++j) {
      const double factor = j == i ? 0 : a[j][i] / a[i][i];
      for (size_t k = i; k <= n; ++k) a[j][k] -= factor * a[i][k];
    }
  }
  Cost cost{};
  for (size_t i = 0; i < n; ++i) cost[of[i]] = a[i][n] / a[i][i] / unit[i];
  return cost;
}

double error_of(const Cost& cost, const std::vector<Timed>& timed) {
  double sum = 0;
  for (const Timed& t : timed) sum += std::pow(seconds(cost, t.sizes) / t.seconds - 1, 2);
  return sum;
}

}  // namespace

const std::vector<std::string_view>& size_names(Kernel kernel) {
  static const std::vector<std::string_view> products{"call", "flop", "output", "left", "right"},
      attention{"call", "query", "score", "product"}, rows{"call", "row", "element"};
  if (kernel <= Kernel::product_weight) return products;
  return kernel <= Kernel::attention_backward ? attention : rows;
}

Sizes product_sizes(double m, double n, double k) { return {1, 2 * m * n * k, m * n, m * k, n * k}; }

Sizes attention_sizes(double heads, double queries, double keys, double head_dim) {
  return {1, heads * queries * head_dim, heads * queries * keys, heads * queries * keys * head_dim};
}

Sizes row_sizes(double rows, double columns) { return {1, rows, rows * columns}; }

double seconds(const Cost& cost, const Sizes& sizes) {
  double sum = 0;
  for (size_t i = 0; i < kSizes; ++i) sum += cost[i] * sizes[i];
  return sum;
}

// The best of all choices of sizes whose constants are not negative is the best without negative constants.
Cost fit(const std::vector<Timed>& timed) {
  for (const Timed& t : timed)
    if (!(t.seconds > 0) || !std::isfinite(t.seconds)) throw Error("[fit] a time is no positive number");
  Cost best{};
  double least = std::numeric_limits<double>::infinity();
  for (unsigned chosen = 1; chosen < 1U << kSizes; ++chosen) {
    const std::optional<Cost> cost = solve(timed, chosen);
    if (!cost) continue;
    bool negative = false;
    for (const double c : *cost) negative = negative || c < 0;
    const double error = negative ? least : error_of(*cost, timed);
    if (error >= least) continue;
    least = error;
    best = *cost;
  }
  if (timed.empty() || !std::isfinite(least)) throw Error("[fit] expected times of several sizes");
  return best;
}

}  // namespace tessera::planner
