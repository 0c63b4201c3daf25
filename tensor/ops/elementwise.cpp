// The CPU loops of the elementwise ops, one instantiation per op of the lists.
#include "tensor/ops/elementwise.h"

#include <array>
#include <utility>

#include "tensor/cpu/loops.h"
#include "tensor/ops/reduce.h"

namespace tessera {
namespace {
void check_same(const char* op, const Tensor& a, const Tensor& b) {
  if (a.dtype() != b.dtype())
    throw Error(std::string("[") + op + "] dtypes differ: " + a.describe() + " and " + b.describe());
}
}  // namespace

template <class Op>
Tensor unary(const Tensor& x) {
  Tensor y = x.make(x.shape());
  with_floating(x.dtype(), Op::name, [&](auto t) {
    using T = decltype(t);
    cpu::map<T, T>(y, x, [](T v) { return T(Op::f(static_cast<Accumulate<T>>(v))); });
  });
  return y;
}

template <class Op>
Tensor unary_backward(const Tensor& dy, const Tensor& x) {
  check_same(Op::name, dy, x);
  Tensor dx = x.make(x.shape());
  with_floating(x.dtype(), Op::name, [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    cpu::map2<T, T, T>(dx, dy.expand(x.shape()), x,
                       [](T g, T v) { return T(static_cast<A>(g) * Op::df(static_cast<A>(v))); });
  });
  return dx;
}

template <class Op>
Tensor binary(const Tensor& a, const Tensor& b) {
  check_same(Op::name, a, b);
  const Shape shape = broadcast(a.shape(), b.shape(), Op::name);
  Tensor y = a.make(shape);
  with_floating(a.dtype(), Op::name, [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    cpu::map2<T, T, T>(y, a.expand(shape), b.expand(shape),
                       [](T u, T v) { return T(Op::f(static_cast<A>(u), static_cast<A>(v))); });
  });
  return y;
}

template <class Op>
Tensor binary_backward(const Tensor& dy, const Tensor& a, const Tensor& b, int operand) {
  check_same(Op::name, a, b);
  const Shape& shape = dy.shape();
  Tensor partial = a.make(shape);
  with_floating(a.dtype(), Op::name, [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const auto run = [&](auto derivative) {
      cpu::map2<T, T, T>(partial, a.expand(shape), b.expand(shape),
                         [=](T u, T v) { return T(derivative(static_cast<A>(u), static_cast<A>(v))); });
    };
    if (operand == 0)
      run([](A u, A v) { return Op::da(u, v); });
    else
      run([](A u, A v) { return Op::db(u, v); });
    cpu::map2<T, T, T>(partial, partial, dy, [](T u, T v) { return T(static_cast<A>(u) * static_cast<A>(v)); });
  });
  return sum_to(partial, operand == 0 ? a.shape() : b.shape());
}

Tensor scale(const Tensor& x, double factor) {
  Tensor y = x.make(x.shape());
  with_floating(x.dtype(), "scale", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const A s = static_cast<A>(factor);
    cpu::map<T, T>(y, x, [s](T v) { return T(static_cast<A>(v) * s); });
  });
  return y;
}

void scale_(Tensor& x, double factor) {
  with_floating(x.dtype(), "scale_", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const A s = static_cast<A>(factor);
    cpu::map<T, T>(x, x, [s](T v) { return T(static_cast<A>(v) * s); });
  });
}

void add_(Tensor& x, const Tensor& y, double factor) {
  const Tensor source = y.expand(x.shape());
  with_floating(x.dtype(), "add_", [&](auto t) {
    with_floating(y.dtype(), "add_", [&](auto u) {
      using T = decltype(t);
      using U = decltype(u);
      using A = Accumulate<T>;
      const A s = static_cast<A>(factor);
      cpu::map2<T, T, U>(x, x, source, [s](T a, U b) {
        return T(math::fma(static_cast<A>(static_cast<Accumulate<U>>(b)), s, static_cast<A>(a)));
      });
    });
  });
}

// Instantiates the functions above for every op of the lists (a table of their addresses keeps them in the library).
template <class... Ops>
auto instantiate_unary(OpList<Ops...>) {
  return std::pair(std::array{&unary<Ops>...}, std::array{&unary_backward<Ops>...});
}
template <class... Ops>
auto instantiate_binary(OpList<Ops...>) {
  return std::pair(std::array{&binary<Ops>...}, std::array{&binary_backward<Ops>...});
}
template auto instantiate_unary(UnaryOps);
template auto instantiate_binary(BinaryOps);

}  // namespace tessera
