// The GPU's loops of the elementwise ops, one instantiation per op of the lists.
#include <array>
#include <utility>

#include "tensor/cuda/loops.cuh"
#include "tensor/ops/elementwise.h"

namespace tessera::cuda {
namespace {

template <class T, class Op>
struct Value {
  using A = Accumulate<T>;
  __device__ T operator()(T x) const { return T(Op::f(static_cast<A>(x))); }
  __device__ T operator()(T a, T b) const { return T(Op::f(static_cast<A>(a), static_cast<A>(b))); }
};

template <class T, class Op>
struct UnaryGradient {
  using A = Accumulate<T>;
  __device__ T operator()(T dy, T x) const { return T(static_cast<A>(dy) * Op::df(static_cast<A>(x))); }
};

template <class T, class Op, int operand>
struct Partial {
  using A = Accumulate<T>;
  __device__ T operator()(T a, T b) const {
    if constexpr (operand == 0)
      return T(Op::da(static_cast<A>(a), static_cast<A>(b)));
    else
      return T(Op::db(static_cast<A>(a), static_cast<A>(b)));
  }
};

template <class T>
struct Times {
  using A = Accumulate<T>;
  __device__ T operator()(T a, T b) const { return T(static_cast<A>(a) * static_cast<A>(b)); }
};

template <class T>
struct Scaled {
  Accumulate<T> factor;
  __device__ T operator()(T x) const { return T(static_cast<Accumulate<T>>(x) * factor); }
};

template <class T, class U>
struct Added {
  using A = Accumulate<T>;
  A factor;
  __device__ T operator()(T a, U b) const {
    return T(math::fma(static_cast<A>(static_cast<Accumulate<U>>(b)), factor, static_cast<A>(a)));
  }
};

}  // namespace

template <class Op>
void unary(const Tensor& y, const Tensor& x) {
  with_floating(x.dtype(), Op::name, [&](auto t) {
    using T = decltype(t);
    map<T, T>(Op::name, Value<T, Op>{}, y, x);
  });
}

template <class Op>
void unary_backward(const Tensor& dx, const Tensor& dy, const Tensor& x) {
  with_floating(x.dtype(), Op::name, [&](auto t) {
    using T = decltype(t);
    map<T, T, T>(Op::name, UnaryGradient<T, Op>{}, dx, dy, x);
  });
}

template <class Op>
void binary(const Tensor& y, const Tensor& a, const Tensor& b) {
  const auto run = [&](auto t) {
    using T = decltype(t);
    map<T, T, T>(Op::name, Value<T, Op>{}, y, a, b);
  };
  if constexpr (std::is_same_v<Op, Add>)
    tessera::with_floating(a.dtype(), Op::name, run);  // losses are added in float64
  else
    with_floating(a.dtype(), Op::name, run);
}

template <class Op>
void derivative(const Tensor& d, const Tensor& a, const Tensor& b, int operand) {
  with_floating(a.dtype(), Op::name, [&](auto t) {
    using T = decltype(t);
    if (operand == 0)
      map<T, T, T>(Op::name, Partial<T, Op, 0>{}, d, a, b);
    else
      map<T, T, T>(Op::name, Partial<T, Op, 1>{}, d, a, b);
  });
}

void multiply(const Tensor& y, const Tensor& a, const Tensor& b) {
  with_floating(a.dtype(), "multiply", [&](auto t) {
    using T = decltype(t);
    map<T, T, T>("multiply", Times<T>{}, y, a, b);
  });
}

void scale(const Tensor& y, const Tensor& x, double factor) {
  with_floating(x.dtype(), "scale", [&](auto t) {
    using T = decltype(t);
    map<T, T>("scale", Scaled<T>{static_cast<Accumulate<T>>(factor)}, y, x);
  });
}

void add_scaled(const Tensor& x, const Tensor& y, double factor) {
  with_floating(x.dtype(), "add_", [&](auto t) {
    with_floating(y.dtype(), "add_", [&](auto u) {
      using T = decltype(t);
      using U = decltype(u);
      map<T, T, U>("add_", Added<T, U>{static_cast<Accumulate<T>>(factor)}, x, x, y);
    });
  });
}

// A table of their addresses keeps the instantiations in the library.
template <class... Ops>
auto instantiate_unary(OpList<Ops...>) {
  return std::pair(std::array{&unary<Ops>...}, std::array{&unary_backward<Ops>...});
}
template <class... Ops>
auto instantiate_binary(OpList<Ops...>) {
  return std::pair(std::array{&binary<Ops>...}, std::array{&derivative<Ops>...});
}
template auto instantiate_unary(UnaryOps);
template auto instantiate_binary(BinaryOps);

}  // namespace tessera::cuda
