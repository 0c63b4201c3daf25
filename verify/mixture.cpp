// Least squares by the normal equations, in float64.
#include "verify/mixture.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace tessera {
namespace {

constexpr int64_t kMostSequences = 64;
constexpr int64_t kMostNumbers = int64_t{1} << 27;
using Vector = std::vector<double>;

void append(Vector& to, const Tensor& t) {
  const Vector part = t.on_host().contiguous().to(DType::float64).to_vector<double>();
  to.insert(to.end(), part.begin(), part.end());
}

double product(const Vector& a, const Vector& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

// Solves a x = b, by elimination with the largest pivot; singular directions get 0.
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

std::optional<Mixture> mixture_of(Reference& reference, int64_t batch, const std::vector<NamedTensor>& found) {
  Vector whole;
  for (const NamedTensor& t : found) append(whole, t.tensor);
  if (batch > kMostSequences || batch * std::ssize(whole) > kMostNumbers) return {};
  const std::vector<FlatUnit> units = reference.trained();
  std::vector<Tensor> kept;
  for (const FlatUnit& unit : units) kept.push_back(unit.grads.clone());
  std::vector<Vector> parts(static_cast<size_t>(batch));
  for (int64_t s = 0; s < batch; ++s) {
    reference.compute_gradients_of(s);
    for (const FlatUnit& unit : units)
      for (const Slot& slot : unit.slots)
        append(parts[static_cast<size_t>(s)], unit.grads.narrow(0, slot.begin, slot.size));
  }
  for (size_t u = 0; u < units.size(); ++u) {
    Tensor to = units[u].grads;
    to.copy_from(kept[u]);
  }
  const auto n = static_cast<size_t>(batch);
  std::vector<Vector> gram(n, Vector(n));
  Vector right(n);
  for (size_t i = 0; i < n; ++i) {
    right[i] = product(parts[i], whole);
    for (size_t j = 0; j <= i; ++j) gram[i][j] = gram[j][i] = product(parts[i], parts[j]);
  }
  Mixture out{.shares = solve(std::move(gram), std::move(right))};
  Vector left = whole;
  for (size_t i = 0; i < n; ++i)
    for (size_t k = 0; k < left.size(); ++k) left[k] -= out.shares[i] * parts[i][k];
  const double norm = product(whole, whole);
  out.residual = norm == 0 ? 0 : std::sqrt(product(left, left) / norm);
  return out;
}

}  // namespace tessera
