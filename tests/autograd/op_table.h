// The op table: one row per op, each a generator of random problems with an independent float64 reference.
// op_table_test.cpp runs every check on every row.
#pragma once
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "tests/support/tensors.h"

namespace tessera::test {

// Random values for a test.
class Random {
 public:
  explicit Random(uint64_t seed) : philox_(Philox::named(seed, "op table")) {}
  int64_t between(int64_t low, int64_t high) {  // inclusive
    return low + static_cast<int64_t>(philox_.below(static_cast<uint64_t>(high - low + 1), next_++));
  }
  double uniform(double low, double high) { return low + (high - low) * static_cast<double>(philox_.uniform(next_++)); }
  template <class T>
  T choose(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<int64_t>(values.size()) - 1)];
  }
  // A shape with the given number of dimensions; sizes up to `max_dim`, often 1 and often odd.
  Shape shape(int rank, int64_t max_dim) {
    Shape s;
    for (int i = 0; i < rank; ++i) s.push_back(between(0, 5) == 0 ? 1 : between(1, max_dim));
    return s;
  }

 private:
  Philox philox_;
  uint64_t next_ = 0;
};

struct Operand {
  Shape shape;
  double low = -2, high = 2;
};

using Values = std::vector<std::vector<double>>;  // row-major elements of each operand

struct Problem {
  std::vector<Operand> operands;
  std::function<Var(const std::vector<Var>&)> op;               // under test, in any floating dtype
  std::function<std::vector<double>(const Values&)> reference;  // the same, implemented naively
  bool rows_alone = false;  // slices of dim 0 of all operands yield slices of the result bitwise
  bool library = false;     // computed by oneDNN, which may split sums depending on threads or strides
  std::string name{};       // of the row
};

struct OpRow {
  std::string name;
  std::function<Problem(Random&)> sample;
};

inline double reference_activation(double x, Activation kind) {
  if (kind == Activation::silu) return x / (1 + std::exp(-x));
  return 0.5 * x *
         (1 + (kind == Activation::gelu_erf ? std::erf(x * M_SQRT1_2)
                                            : std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))));
}

// f(0) to f(count - 1).
template <class F>
std::vector<double> elements(size_t count, const F& f) {
  std::vector<double> y(count);
  for (size_t i = 0; i < count; ++i) y[i] = f(i);
  return y;
}

void add_elementwise_rows(std::vector<OpRow>& table);
void add_rows(std::vector<OpRow>& table);

}  // namespace tessera::test
