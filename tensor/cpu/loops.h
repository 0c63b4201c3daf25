// One loop over broadcast, strided operands: dims that run on are merged, and each inner row is a plain loop.
#pragma once
#include <array>
#include <functional>
#include <span>

#include "tensor/cpu/vectorize.h"
#include "tensor/tensor.h"

namespace tessera::cpu {

struct Row {
  std::array<int64_t, kMaxOperands> at{};    // offset of the first element of each operand
  std::array<int64_t, kMaxOperands> step{};  // its stride
  int64_t n = 0;
};

// Cuts operands of one (expanded) shape into inner rows, or parts of rows, and calls f on each, on the rank's threads.
void for_each_row(std::span<const Tensor* const> operands, const std::function<void(const Row&)>& f);

// y[i] = f(x[i]) with any dtypes; x and y may be the same memory.
template <class Y, class X, class F>
void map(const Tensor& y, const Tensor& x, const F& f) {
  Y* const py = y.data<Y>();
  const X* const px = x.data<X>();
  for_each_row(std::array{&y, &x}, [=](const Row& row) {
    Y* const yr = py + row.at[0];
    const X* const xr = px + row.at[1];
    const int64_t n = row.n;
    if (row.step[0] == 1 && row.step[1] == 1) {
      vectorized([=] {
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) yr[i] = f(xr[i]);
      });
    } else {
      for (int64_t i = 0; i < n; ++i) yr[i * row.step[0]] = f(xr[i * row.step[1]]);
    }
  });
}

// y[i] = f(a[i], b[i]); operands expanded to y's shape; y may be a or b.
template <class Y, class A, class B, class F>
void map2(const Tensor& y, const Tensor& a, const Tensor& b, const F& f) {
  Y* const py = y.data<Y>();
  const A* const pa = a.data<A>();
  const B* const pb = b.data<B>();
  for_each_row(std::array{&y, &a, &b}, [=](const Row& row) {
    Y* const yr = py + row.at[0];
    const A* const ar = pa + row.at[1];
    const B* const br = pb + row.at[2];
    const int64_t n = row.n;
    if (row.step[0] == 1 && row.step[1] == 1 && row.step[2] == 1) {
      vectorized([=] {
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) yr[i] = f(ar[i], br[i]);
      });
    } else {
      for (int64_t i = 0; i < n; ++i) yr[i * row.step[0]] = f(ar[i * row.step[1]], br[i * row.step[2]]);
    }
  });
}

}  // namespace tessera::cpu
