// Element by element, in float64.
#include "verify/difference.h"

#include <algorithm>
#include <cmath>

namespace tessera {
namespace {

constexpr double kSameFactor = 2e-3;  // relative distance of what a factor leaves

std::vector<double> numbers(const Tensor& t) { return t.to(DType::float64).to_vector<double>(); }

double largest(const std::vector<double>& x) {
  double out = 0;
  for (const double v : x) out = std::max(out, std::abs(v));
  return out;
}

std::vector<int64_t> place_of(int64_t flat, const Shape& shape) {
  std::vector<int64_t> out(static_cast<size_t>(shape.rank()));
  for (int d = shape.rank(); d-- > 0;) {
    out[static_cast<size_t>(d)] = flat % shape[d];
    flat /= shape[d];
  }
  return out;
}

// Adds up what the least squares of a factor need.
struct Ratio {
  double ff = 0, fe = 0, ee = 0;
  void add(double found, double expected) {
    ff += found * found;
    fe += found * expected;
    ee += expected * expected;
  }
  std::optional<double> factor() const {
    if (ee == 0 || ff == 0) return {};
    const double c = fe / ee, left = std::max(0.0, ff - 2 * c * fe + c * c * ee);
    if (std::sqrt(left / ff) > kSameFactor) return {};
    return c;
  }
};

}  // namespace

TensorDifference difference_of(const Compared& pair) {
  const std::vector<double> found = numbers(pair.found), expected = numbers(pair.expected),
                            before = pair.before.defined() ? numbers(pair.before) : std::vector<double>();
  const double allowed = pair.tolerance * largest(expected);
  TensorDifference out;
  out.elements = std::ssize(found);
  out.unchanged = !before.empty();
  for (int d = 0; d < pair.found.shape().rank(); ++d) out.shape.push_back(pair.found.shape()[d]);
  Ratio ratio;
  for (size_t i = 0; i < found.size(); ++i) {
    const double f = found[i], e = expected[i];
    if (f == e || std::abs(f - e) <= allowed) continue;
    ratio.add(f, e);
    out.unchanged = out.unchanged && f == before[i];
    if (out.wrong++ > 0) continue;
    out.first = place_of(static_cast<int64_t>(i), pair.found.shape());
    out.rank = pair.owners.defined() ? pair.owners.data<int32_t>()[i] : 0;
    out.found = f;
    out.expected = e;
  }
  out.factor = ratio.factor();
  out.unchanged = out.unchanged && out.wrong > 0;
  return out;
}

bool are_permuted(const std::vector<Compared>& pairs) {
  std::vector<double> all;
  for (const Compared& pair : pairs) {
    const std::vector<double> expected = numbers(pair.expected);
    all.insert(all.end(), expected.begin(), expected.end());
  }
  std::ranges::sort(all);
  int64_t wrong = 0, elsewhere = 0;
  double difference = 0, norm = 0;
  for (const Compared& pair : pairs) {
    const std::vector<double> found = numbers(pair.found), expected = numbers(pair.expected);
    for (size_t i = 0; i < found.size(); ++i) {
      if (found[i] == expected[i]) continue;
      ++wrong;
      difference += (found[i] - expected[i]) * (found[i] - expected[i]);
      norm += expected[i] * expected[i];
      elsewhere += found[i] == 0 || std::ranges::binary_search(all, found[i]) ? 1 : 0;  // 0: padding
    }
  }
  // Narrow dtypes have few values, which occur in many places: what is misplaced is far from what belongs there, too.
  return wrong > 0 && 10 * elsewhere >= 8 * wrong && difference > 0.1 * norm;
}

}  // namespace tessera
