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
  const auto on_cpu = [&] {
    with_floating(x.dtype(), Op::name, [&](auto t) {
      using T = decltype(t);
      cpu::map<T, T>(y, x, [](T v) { return T(Op::f(static_cast<Accumulate<T>>(v))); });
    });
  };
  on_device(x.device(), on_cpu, [&] { cuda::unary<Op>(y, x); });
  return y;
}

template <class Op>
Tensor unary_backward(const Tensor& dy_any, const Tensor& x) {
  check_same(Op::name, dy_any, x);
  Tensor dx = x.make(x.shape());
  const Tensor dy = dy_any.expand(x.shape());
  const auto on_cpu = [&] {
    with_floating(x.dtype(), Op::name, [&](auto t) {
      using T = decltype(t);
      using A = Accumulate<T>;
      cpu::map2<T, T, T>(dx, dy, x, [](T g, T v) { return T(static_cast<A>(g) * Op::df(static_cast<A>(v))); });
    });
  };
  on_device(x.device(), on_cpu, [&] { cuda::unary_backward<Op>(dx, dy, x); });
  return dx;
}

template <class Op>
Tensor binary(const Tensor& a_any, const Tensor& b_any) {
  check_same(Op::name, a_any, b_any);
  const Shape shape = broadcast(a_any.shape(), b_any.shape(), Op::name);
  const Tensor a = a_any.expand(shape), b = b_any.expand(shape);
  Tensor y = a.make(shape);
  const auto on_cpu = [&] {
    with_floating(a.dtype(), Op::name, [&](auto t) {
      using T = decltype(t);
      using A = Accumulate<T>;
      cpu::map2<T, T, T>(y, a, b, [](T u, T v) { return T(Op::f(static_cast<A>(u), static_cast<A>(v))); });
    });
  };
  on_device(a.device(), on_cpu, [&] { cuda::binary<Op>(y, a, b); });
  return y;
}

namespace {
// The derivative of Op by one operand at (a, b).
template <class Op>
void derivative_on_cpu(const Tensor& d, const Tensor& a, const Tensor& b, int operand) {
  with_floating(a.dtype(), Op::name, [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const auto run = [&](auto derivative) {
      cpu::map2<T, T, T>(d, a, b, [=](T u, T v) { return T(derivative(static_cast<A>(u), static_cast<A>(v))); });
    };
    if (operand == 0)
      run([](A u, A v) { return Op::da(u, v); });
    else
      run([](A u, A v) { return Op::db(u, v); });
  });
}

void multiply_on_cpu(const Tensor& y, const Tensor& a, const Tensor& b) {
  with_floating(a.dtype(), "multiply", [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    cpu::map2<T, T, T>(y, a, b, [](T u, T v) { return T(static_cast<A>(u) * static_cast<A>(v)); });
  });
}
}  // namespace

template <class Op>
Tensor binary_backward(const Tensor& dy, const Tensor& a_any, const Tensor& b_any, int operand) {
  check_same(Op::name, a_any, b_any);
  const Tensor a = a_any.expand(dy.shape()), b = b_any.expand(dy.shape());
  const Tensor partial = a.make(dy.shape());
  const auto on_cpu = [&] {
    derivative_on_cpu<Op>(partial, a, b, operand);
    multiply_on_cpu(partial, partial, dy);
  };
  const auto on_gpu = [&] {
    cuda::derivative<Op>(partial, a, b, operand);
    cuda::multiply(partial, partial, dy);
  };
  on_device(a.device(), on_cpu, on_gpu);
  return sum_to(partial, operand == 0 ? a_any.shape() : b_any.shape());
}

namespace {
void scale_into(const Tensor& y, const Tensor& x, double factor) {
  const auto on_cpu = [&] {
    with_floating(x.dtype(), "scale", [&](auto t) {
      using T = decltype(t);
      using A = Accumulate<T>;
      const A s = static_cast<A>(factor);
      cpu::map<T, T>(y, x, [s](T v) { return T(static_cast<A>(v) * s); });
    });
  };
  on_device(x.device(), on_cpu, [&] { cuda::scale(y, x, factor); });
}

void add_on_cpu(const Tensor& x, const Tensor& y, double factor) {
  with_floating(x.dtype(), "add_", [&](auto t) {
    with_floating(y.dtype(), "add_", [&](auto u) {
      using T = decltype(t);
      using U = decltype(u);
      using A = Accumulate<T>;
      const A s = static_cast<A>(factor);
      cpu::map2<T, T, U>(x, x, y, [s](T a, U b) {
        return T(math::fma(static_cast<A>(static_cast<Accumulate<U>>(b)), s, static_cast<A>(a)));
      });
    });
  });
}
}  // namespace

Tensor scale(const Tensor& x, double factor) {
  Tensor y = x.make(x.shape());
  scale_into(y, x, factor);
  return y;
}

void scale_(Tensor& x, double factor) { scale_into(x, x, factor); }

void add_(Tensor& x, const Tensor& y, double factor) {
  const Tensor source = y.expand(x.shape());
  on_device(
      x.device(), [&] { add_on_cpu(x, source, factor); }, [&] { cuda::add_scaled(x, source, factor); });
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
