// Tensors of numbers for tests, and how far two are apart.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "tensor/random.h"
#include "tensor/tensor.h"

namespace tessera::test {

// Uniform numbers, on the host.
inline Tensor drawn(const Shape& shape, DType dtype, const std::string& name, double low = -3, double high = 3) {
  const Philox random = Philox::named(7, name);
  std::vector<double> v(static_cast<size_t>(shape.numel()));
  for (size_t i = 0; i < v.size(); ++i) v[i] = low + (high - low) * static_cast<double>(random.uniform(i));
  return Tensor::of<double>(v, shape, make_arena()).to(dtype);
}

// Compares shapes, dtypes and bits of tensors on any devices.
inline bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = a.on_host().contiguous(), y = b.on_host().contiguous();
  return x.shape() == y.shape() && x.dtype() == y.dtype() &&
         std::memcmp(x.raw(), y.raw(), static_cast<size_t>(x.nbytes())) == 0;
}

// The largest relative difference of two elements.
inline double farthest(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = a.to(DType::float64).to_vector<double>(), y = b.to(DType::float64).to_vector<double>();
  double most = 0;
  for (size_t i = 0; i < x.size(); ++i) most = std::max(most, std::abs(x[i] - y[i]) / std::max(1e-30, std::abs(y[i])));
  return most;
}

}  // namespace tessera::test
