// A custom op with its gradient, written like the library's ops, and checked against finite differences.
#include <tessera/tessera.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <vector>

namespace {

using namespace tessera;

// The gated linear unit, y = a sigmoid(b): two tensors of equal shape -> the same shape (Dauphin et al. 2017).
//
// The vjp ("vector-Jacobian product") computes the gradients of a and b from that of y, with s = sigmoid(b):
//   da = dy s    db = dy a s (1 - s)
Var glu(const Var& a, const Var& b) {
  if (!(a.shape() == b.shape()))
    throw Error("[glu] a is " + a.value().describe() + ", b is " + b.value().describe() + "; expected one shape");
  const Tensor left = a.value().contiguous(), gate = b.value().contiguous(), out = left.make(left.shape());
  with_floating(left.dtype(), "glu", [&](auto zero) {
    using T = decltype(zero);
    const T *x = left.data<T>(), *g = gate.data<T>();
    T* y = out.data<T>();
    for (int64_t i = 0; i < out.numel(); ++i) y[i] = T(x[i] / (1 + std::exp(-g[i])));
  });
  return record_one("glu", out, {a, b}, [left, gate](Grads& grads) {
    const Tensor grad = grads.output().contiguous(), to_a = left.make(left.shape()), to_b = left.make(left.shape());
    with_floating(left.dtype(), "glu", [&](auto zero) {
      using T = decltype(zero);
      const T *x = left.data<T>(), *g = gate.data<T>(), *dy = grad.data<T>();
      T *da = to_a.data<T>(), *db = to_b.data<T>();
      for (int64_t i = 0; i < grad.numel(); ++i) {
        const Accumulate<T> s = 1 / (1 + std::exp(-g[i]));
        da[i] = T(dy[i] * s);
        db[i] = T(dy[i] * x[i] * s * (1 - s));
      }
    });
    grads.set(0, to_a);
    grads.set(1, to_b);
  });
}

// The largest difference between the gradient of f() with respect to x and (f(x + h) - f(x - h)) / 2h, over the
// elements of x.
double largest_error(const std::function<Var()>& f, const Var& x) {
  const NoGrad off;
  constexpr double kStep = 1e-5;
  double largest = 0;
  for (int64_t i = 0; i < x.value().numel(); ++i) {
    double& element = x.value().data<double>()[i];
    const double before = element;
    const auto value_at = [&](double moved) {
      element = moved;
      return f().value().item<double>();
    };
    const double slope = (value_at(before + kStep) - value_at(before - kStep)) / (2 * kStep);
    element = before;
    largest = std::max(largest, std::abs(slope - x.grad().to_vector<double>()[static_cast<size_t>(i)]));
  }
  return largest;
}

// A leaf with normally distributed values that requires a gradient.
Var random_leaf(const char* name, const Shape& shape, const ArenaPtr& arena) {
  const Philox random = Philox::named(1, name);
  std::vector<double> values;
  for (int64_t i = 0; i < shape.numel(); ++i) values.push_back(random.normal(static_cast<uint64_t>(i)));
  return Var(Tensor::of<double>(values, shape, arena), true);
}

}  // namespace

int main() {
  const ArenaPtr arena = make_arena();
  const Var a = random_leaf("a", {3, 5}, arena), b = random_leaf("b", {3, 5}, arena);
  const auto f = [&] { return sum(unary<Square>(glu(a, b))); };  // with other ops around it
  backward(f());
  const double error_a = largest_error(f, a), error_b = largest_error(f, b);
  std::printf("glu: its gradients are within %.1g and %.1g of finite differences\n", error_a, error_b);
  return std::max(error_a, error_b) < 1e-8 ? 0 : 1;
}
