// Comparison of tensors in float64, and decomposition of gradients into sequences.
#include "verify/diagnosis/differences.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

namespace tessera {
namespace {

constexpr double kLeftByFactor = 2e-3;  // relative residual after applying a factor
constexpr double kExplained = 0.01;     // maximum fraction of the squared difference that remains

std::vector<double> to_doubles(const Tensor& t) { return t.to(DType::float64).to_vector<double>(); }

double largest(const std::vector<double>& x) {
  double out = 0;
  for (const double v : x) out = std::max(out, std::abs(v));
  return out;
}

std::vector<int64_t> multi_index(int64_t flat, const Shape& shape) {
  std::vector<int64_t> out(static_cast<size_t>(shape.ndim()));
  for (int d = shape.ndim(); d-- > 0;) {
    out[static_cast<size_t>(d)] = flat % shape[d];
    flat /= shape[d];
  }
  return out;
}

// Least-squares fit of a factor.
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
    if (std::sqrt(left / ff) > kLeftByFactor || left > kExplained * (ff - 2 * fe + ee)) return {};
    return c;
  }
};

}  // namespace

TensorDifference compute_difference(const Compared& pair) {
  const std::vector<double> found = to_doubles(pair.found), expected = to_doubles(pair.expected),
                            before = pair.before.defined() ? to_doubles(pair.before) : std::vector<double>();
  const double allowed = pair.tolerance * largest(expected);
  TensorDifference out;
  out.elements = std::ssize(found);
  out.unchanged = !before.empty();
  for (int d = 0; d < pair.found.shape().ndim(); ++d) out.shape.push_back(pair.found.shape()[d]);
  Ratio ratio;
  for (size_t i = 0; i < found.size(); ++i) {
    const double f = found[i], e = expected[i];
    if (f == e || std::abs(f - e) <= allowed) continue;
    ratio.add(f, e);
    out.unchanged = out.unchanged && f == before[i];
    if (out.wrong++ > 0) continue;
    out.first = multi_index(static_cast<int64_t>(i), pair.found.shape());
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
    const std::vector<double> expected = to_doubles(pair.expected);
    all.insert(all.end(), expected.begin(), expected.end());
  }
  std::ranges::sort(all);
  int64_t wrong = 0, elsewhere = 0;
  double difference = 0, norm = 0;
  for (const Compared& pair : pairs) {
    const std::vector<double> found = to_doubles(pair.found), expected = to_doubles(pair.expected);
    for (size_t i = 0; i < found.size(); ++i) {
      if (found[i] == expected[i]) continue;
      ++wrong;
      difference += (found[i] - expected[i]) * (found[i] - expected[i]);
      norm += expected[i] * expected[i];
      elsewhere += found[i] == 0 || std::ranges::binary_search(all, found[i]) ? 1 : 0;  // 0: padding
    }
  }
  // Narrow dtypes have few values, which occur in many places, so misplaced values must also differ widely.
  return wrong > 0 && 10 * elsewhere >= 8 * wrong && difference > 0.1 * norm;
}

namespace {

constexpr int64_t kMaxSequences = 64;
constexpr int64_t kMaxValues = int64_t{1} << 27;
using Vector = std::vector<double>;

void append(Vector& to, const Tensor& t) {
  const Vector values = t.on_host().contiguous().to(DType::float64).to_vector<double>();
  to.insert(to.end(), values.begin(), values.end());
}

double product(const Vector& a, const Vector& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

// Solves a x = b by elimination with pivoting; singular directions get 0.
Vector solve(std::vector<Vector> a, Vector b) {
  const size_t n = b.size();
  std::vector<size_t> order(n);
  for (size_t c = 0; c < n; ++c) {
    size_t pivot = c;
    for (size_t r = c; r < n; ++r)
      if (std::abs(a[r][c]) > std::abs(a[pivot][c])) pivot = r;
    std::swap(a[c], a[pivot]);
    std::swap(b[c], b[pivot]);
    for (size_t r = c + 1; r < n && a[c][c] != 0; ++r) {
      const double factor = a[r][c] / a[c][c];
      for (size_t k = c; k < n; ++k) a[r][k] -= factor * a[c][k];
      b[r] -= factor * b[c];
    }
  }
  for (size_t c = n; c-- > 0;) {
    for (size_t k = c + 1; k < n; ++k) b[c] -= a[c][k] * b[k];
    b[c] = a[c][c] == 0 ? 0 : b[c] / a[c][c];
  }
  return b;
}

}  // namespace

std::optional<Mixture> find_mixture(Reference& reference, int64_t batch, const std::vector<NamedTensor>& found) {
  Vector full;
  for (const NamedTensor& t : found) append(full, t.tensor);
  if (batch > kMaxSequences || batch * std::ssize(full) > kMaxValues) return {};
  const std::vector<FlatUnit> units = reference.trained();
  std::vector<Tensor> saved;
  for (const FlatUnit& unit : units) saved.push_back(unit.grads.clone());
  std::vector<Vector> columns(static_cast<size_t>(batch));
  for (int64_t s = 0; s < batch; ++s) {
    reference.compute_sequence_gradients(s);
    for (const FlatUnit& unit : units)
      for (const Slot& slot : unit.slots)
        append(columns[static_cast<size_t>(s)], unit.grads.narrow(0, slot.begin, slot.size));
  }
  for (size_t u = 0; u < units.size(); ++u) {
    Tensor to = units[u].grads;
    to.copy_from(saved[u]);
  }
  const auto n = static_cast<size_t>(batch);
  std::vector<Vector> gram(n, Vector(n));
  Vector right(n);
  for (size_t i = 0; i < n; ++i) {
    right[i] = product(columns[i], full);
    for (size_t j = 0; j <= i; ++j) gram[i][j] = gram[j][i] = product(columns[i], columns[j]);
  }
  Mixture out{.weights = solve(std::move(gram), std::move(right))};
  Vector left = full;
  for (size_t i = 0; i < n; ++i)
    for (size_t k = 0; k < left.size(); ++k) left[k] -= out.weights[i] * columns[i][k];
  const double norm = product(full, full);
  out.residual = norm == 0 ? 0 : std::sqrt(product(left, left) / norm);
  return out;
}

}  // namespace tessera
