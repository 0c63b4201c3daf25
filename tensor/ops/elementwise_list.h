// Elementwise ops, each defined once. The CPU loop, autograd binding, tests, micro-benchmarks and CUDA kernel iterate
// over these lists: a new op needs one struct and one list entry.
#pragma once
#include <cstdint>

#include "tensor/math.h"

namespace tessera {

template <class... Ops>
struct OpList {
  template <class F>
  static void for_each(F&& f) {
    (f(Ops{}), ...);
  }
};

// y = f(x), df(x) = dy/dx; `low` and `high` bound the random inputs of tests.
struct Neg {
  static constexpr const char* name = "neg";
  static constexpr double low = -3, high = 3;
  static constexpr auto f(auto x) { return -x; }
  static constexpr auto df(auto x) { return decltype(x)(-1); }
};
struct Exp {
  static constexpr const char* name = "exp";
  static constexpr double low = -4, high = 4;
  static constexpr auto f(auto x) { return math::exp(x); }
  static constexpr auto df(auto x) { return math::exp(x); }
};
struct Log {
  static constexpr const char* name = "log";
  static constexpr double low = 0.1, high = 5;
  static constexpr auto f(auto x) { return math::log(x); }
  static constexpr auto df(auto x) { return 1 / x; }
};
struct Sqrt {
  static constexpr const char* name = "sqrt";
  static constexpr double low = 0.1, high = 5;
  static constexpr auto f(auto x) { return math::sqrt(x); }
  static constexpr auto df(auto x) { return decltype(x)(0.5) / math::sqrt(x); }
};
struct Square {
  static constexpr const char* name = "square";
  static constexpr double low = -3, high = 3;
  static constexpr auto f(auto x) { return x * x; }
  static constexpr auto df(auto x) { return 2 * x; }
};
struct Reciprocal {
  static constexpr const char* name = "reciprocal";
  static constexpr double low = 0.2, high = 3;
  static constexpr auto f(auto x) { return 1 / x; }
  static constexpr auto df(auto x) { return -1 / (x * x); }
};
struct Tanh {
  static constexpr const char* name = "tanh";
  static constexpr double low = -3, high = 3;
  static constexpr auto f(auto x) { return math::tanh(x); }
  static constexpr auto df(auto x) {
    const auto t = math::tanh(x);
    return 1 - t * t;
  }
};
struct Sigmoid {
  static constexpr const char* name = "sigmoid";
  static constexpr double low = -5, high = 5;
  static constexpr auto f(auto x) { return math::sigmoid(x); }
  static constexpr auto df(auto x) {
    const auto s = math::sigmoid(x);
    return s * (1 - s);
  }
};
struct Relu {
  static constexpr const char* name = "relu";
  static constexpr double low = -3, high = 3;
  static constexpr auto f(auto x) { return x > 0 ? x : decltype(x)(0); }
  static constexpr auto df(auto x) { return x > 0 ? decltype(x)(1) : decltype(x)(0); }
};
struct Silu {
  static constexpr const char* name = "silu";
  static constexpr double low = -5, high = 5;
  static constexpr auto f(auto x) { return x * math::sigmoid(x); }
  static constexpr auto df(auto x) {
    const auto s = math::sigmoid(x);
    return math::fma(x * s, 1 - s, s);
  }
};
// Gelu: GPT-2's tanh approximation, x (1 + tanh u) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), which is x sigmoid(2u).
// GeluErf: x Phi(x) with the normal CDF Phi. Hendrycks and Gimpel 2016, section 2.
struct Gelu {
  static constexpr const char* name = "gelu";
  static constexpr double low = -4, high = 4;
  static constexpr auto twice_u(auto x) {
    return x * math::fma(decltype(x)(0.0713548162726009), x * x, decltype(x)(1.5957691216057308));
  }
  static constexpr auto f(auto x) { return x * math::sigmoid(twice_u(x)); }
  static constexpr auto df(auto x) {
    const auto s = math::sigmoid(twice_u(x));
    const auto slope = math::fma(decltype(x)(0.2140644488178027), x * x, decltype(x)(1.5957691216057308));
    return math::fma(x * s * (1 - s), slope, s);
  }
};
struct GeluErf {
  static constexpr const char* name = "gelu_erf";
  static constexpr double low = -4, high = 4;
  static constexpr auto bell(auto x) { return math::exp(decltype(x)(-0.5) * x * x); }
  static constexpr auto f(auto x) { return x * math::normal_below(x, bell(x)); }
  static constexpr auto df(auto x) {
    const auto e = bell(x);
    return math::fma(x * e, decltype(x)(0.3989422804014327), math::normal_below(x, e));
  }
};
using UnaryOps = OpList<Neg, Exp, Log, Sqrt, Square, Reciprocal, Tanh, Sigmoid, Relu, Silu, Gelu, GeluErf>;

// Activations of feed-forward layers (tensor/ops/activations.h). A new one needs an op above, and an entry in this enum
// and in with_activation(). Models and file formats define their own names for it.
enum class Activation : uint8_t { gelu, gelu_erf, silu };
template <class F>
auto with_activation(Activation kind, const F& f) {
  if (kind == Activation::gelu_erf) return f(GeluErf());
  if (kind == Activation::silu) return f(Silu());
  return f(Gelu());
}

// da and db are the partial derivatives of f.
struct Add {
  static constexpr const char* name = "add";
  static constexpr double low = -3, high = 3;
  static constexpr auto f(auto a, auto b) { return a + b; }
  static constexpr auto da(auto a, auto) { return decltype(a)(1); }
  static constexpr auto db(auto a, auto) { return decltype(a)(1); }
};
struct Sub {
  static constexpr const char* name = "sub";
  static constexpr double low = -3, high = 3;
  static constexpr auto f(auto a, auto b) { return a - b; }
  static constexpr auto da(auto a, auto) { return decltype(a)(1); }
  static constexpr auto db(auto a, auto) { return decltype(a)(-1); }
};
struct Mul {
  static constexpr const char* name = "mul";
  static constexpr double low = -3, high = 3;
  static constexpr auto f(auto a, auto b) { return a * b; }
  static constexpr auto da(auto, auto b) { return b; }
  static constexpr auto db(auto a, auto) { return a; }
};
struct Div {
  static constexpr const char* name = "div";
  static constexpr double low = 0.3, high = 3;
  static constexpr auto f(auto a, auto b) { return a / b; }
  static constexpr auto da(auto, auto b) { return 1 / b; }
  static constexpr auto db(auto a, auto b) { return -a / (b * b); }
};
struct Maximum {  // the gradient of a tie goes to a
  static constexpr const char* name = "maximum";
  static constexpr double low = -3, high = 3;
  static constexpr auto f(auto a, auto b) { return a >= b ? a : b; }
  static constexpr auto da(auto a, auto b) { return a >= b ? decltype(a)(1) : decltype(a)(0); }
  static constexpr auto db(auto a, auto b) { return a >= b ? decltype(a)(0) : decltype(a)(1); }
};
struct Minimum {
  static constexpr const char* name = "minimum";
  static constexpr double low = -3, high = 3;
  static constexpr auto f(auto a, auto b) { return a <= b ? a : b; }
  static constexpr auto da(auto a, auto b) { return a <= b ? decltype(a)(1) : decltype(a)(0); }
  static constexpr auto db(auto a, auto b) { return a <= b ? decltype(a)(0) : decltype(a)(1); }
};
using BinaryOps = OpList<Add, Sub, Mul, Div, Maximum, Minimum>;

// Kernels compute in the accumulation type; the CPU and GPU loops round their result once.
template <class Op>
struct Value {
  static constexpr const char* name = Op::name;
  constexpr auto operator()(auto... x) const { return Op::f(x...); }
};
template <class Op>
struct Slope {
  static constexpr const char* name = Op::name;
  constexpr auto operator()(auto dy, auto x) const { return dy * Op::df(x); }
};
template <class Op, int operand>
struct Partial {
  static constexpr const char* name = Op::name;
  constexpr auto operator()(auto a, auto b) const {
    if constexpr (operand == 0)
      return Op::da(a, b);
    else
      return Op::db(a, b);
  }
};
struct Scaled {
  static constexpr const char* name = "scale";
  double factor;
  constexpr auto operator()(auto x) const { return x * static_cast<decltype(x)>(factor); }
};
struct AddScaled {
  static constexpr const char* name = "add_";
  double factor;
  constexpr auto operator()(auto x, auto y) const {
    using A = decltype(x);
    return math::fma(static_cast<A>(y), static_cast<A>(factor), x);
  }
};

}  // namespace tessera
