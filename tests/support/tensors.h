// Test tensors, and their comparison.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "tensor/random.h"
#include "tensor/tensor.h"

namespace tessera::test {

// Uniform random values on the host.
inline Tensor random_tensor(const Shape& shape, DType dtype, const std::string& name, double low = -3,
                            double high = 3) {
  const Philox random = Philox::named(7, name);
  std::vector<double> v(static_cast<size_t>(shape.numel()));
  for (size_t i = 0; i < v.size(); ++i) v[i] = low + (high - low) * static_cast<double>(random.uniform(i));
  return Tensor::of<double>(v, shape, make_arena()).to(dtype);
}

// Normal random values of stream `what`.
inline Tensor normal(const Shape& shape, DType dtype, uint64_t seed, const char* what,
                     const ArenaPtr& arena = make_arena()) {
  const Philox random = Philox::named(seed, what);
  std::vector<double> v(static_cast<size_t>(shape.numel()));
  for (size_t i = 0; i < v.size(); ++i) v[i] = random.normal(i);
  return Tensor::of<double>(v, shape, arena->host()).to(dtype).to(arena);
}

inline std::vector<double> host_values(const Tensor& t) { return t.on_host().to(DType::float64).to_vector<double>(); }

// Compares shapes, dtypes and bits of tensors on any devices.
inline bool bitwise_equal(const Tensor& a, const Tensor& b) {
  const Tensor x = a.on_host().contiguous(), y = b.on_host().contiguous();
  return x.shape() == y.shape() && x.dtype() == y.dtype() &&
         std::memcmp(x.raw(), y.raw(), static_cast<size_t>(x.nbytes())) == 0;
}

// Largest element-wise difference relative to the largest element of b. Equal infinities do not differ.
inline double apart(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.shape(), b.shape());
  const std::vector<double> x = host_values(a), y = host_values(b);
  double max_error = 0, largest = 1e-30;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i] && std::isinf(x[i])) continue;
    max_error = std::max(max_error, std::isfinite(x[i]) ? std::abs(x[i] - y[i]) : INFINITY);
    largest = std::max(largest, std::abs(y[i]));
  }
  return max_error / largest;
}

// |a - b| / max(|b|, floor), where |x| is the 2-norm.
inline double distance(std::span<const double> a, std::span<const double> b, double floor = 1e-300) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference) / std::max(std::sqrt(norm), floor);
}
inline double distance(const Tensor& a, const Tensor& b) { return distance(host_values(a), host_values(b)); }

// Largest relative difference between corresponding elements.
inline double farthest(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = host_values(a), y = host_values(b);
  double max_error = 0;
  for (size_t i = 0; i < x.size(); ++i)
    max_error = std::max(max_error, std::abs(x[i] - y[i]) / std::max(1e-30, std::abs(y[i])));
  return max_error;
}

// A tensor whose element i is f(i).
template <class F>
Tensor made(const Shape& shape, DType dtype, const ArenaPtr& arena, const F& f) {
  std::vector<double> v(static_cast<size_t>(shape.numel()));
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<double>(f(i));
  return Tensor::of<double>(v, shape, arena->host()).to(dtype).to(arena);
}

// Compares corresponding tensors of two lists with same_bits(); all must be defined.
inline testing::AssertionResult bitwise_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  if (a.size() != b.size()) return testing::AssertionFailure() << a.size() << " and " << b.size() << " tensors";
  for (size_t i = 0; i < a.size(); ++i)
    if (!a[i].defined() || !b[i].defined() || !bitwise_equal(a[i], b[i]))
      return testing::AssertionFailure() << "tensor " << i << " of " << a.size() << " differs";
  return testing::AssertionSuccess();
}

}  // namespace tessera::test
