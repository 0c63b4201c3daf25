// The elementwise ops, each written once: its name, its value and its derivatives.
//
// The CPU loop, the autograd binding, the tests, the micro-benchmarks and the CUDA kernel all iterate these lists, so
// an op is added by writing one struct and naming it in its list.
#pragma once
#include "tensor/math.h"

namespace tessera {

template <class... Ops>
struct OpList {
  // Calls f with a value of each op's type, in order.
  template <class F>
  static void for_each(F&& f) {
    (f(Ops{}), ...);
  }
};

// Unary: y = f(x); df(x) is dy/dx. `low` and `high` bound the inputs that tests draw.
struct Neg {
  static constexpr const char* name = "neg";
  static constexpr double low = -3, high = 3;
  template <class T>
  static constexpr T f(T x) {
    return -x;
  }
  template <class T>
  static constexpr T df(T) {
    return T(-1);
  }
};
struct Exp {
  static constexpr const char* name = "exp";
  static constexpr double low = -4, high = 4;
  template <class T>
  static constexpr T f(T x) {
    return math::exp(x);
  }
  template <class T>
  static constexpr T df(T x) {
    return math::exp(x);
  }
};
struct Log {
  static constexpr const char* name = "log";
  static constexpr double low = 0.1, high = 5;
  template <class T>
  static constexpr T f(T x) {
    return math::log(x);
  }
  template <class T>
  static constexpr T df(T x) {
    return T(1) / x;
  }
};
struct Sqrt {
  static constexpr const char* name = "sqrt";
  static constexpr double low = 0.1, high = 5;
  template <class T>
  static constexpr T f(T x) {
    return math::sqrt(x);
  }
  template <class T>
  static constexpr T df(T x) {
    return T(0.5) / math::sqrt(x);
  }
};
struct Square {
  static constexpr const char* name = "square";
  static constexpr double low = -3, high = 3;
  template <class T>
  static constexpr T f(T x) {
    return x * x;
  }
  template <class T>
  static constexpr T df(T x) {
    return T(2) * x;
  }
};
struct Reciprocal {
  static constexpr const char* name = "reciprocal";
  static constexpr double low = 0.2, high = 3;
  template <class T>
  static constexpr T f(T x) {
    return T(1) / x;
  }
  template <class T>
  static constexpr T df(T x) {
    return T(-1) / (x * x);
  }
};
struct Tanh {
  static constexpr const char* name = "tanh";
  static constexpr double low = -3, high = 3;
  template <class T>
  static constexpr T f(T x) {
    return math::tanh(x);
  }
  template <class T>
  static constexpr T df(T x) {
    const T t = math::tanh(x);
    return T(1) - t * t;
  }
};
struct Sigmoid {
  static constexpr const char* name = "sigmoid";
  static constexpr double low = -5, high = 5;
  template <class T>
  static constexpr T f(T x) {
    return math::sigmoid(x);
  }
  template <class T>
  static constexpr T df(T x) {
    const T s = math::sigmoid(x);
    return s * (T(1) - s);
  }
};
struct Relu {
  static constexpr const char* name = "relu";
  static constexpr double low = -3, high = 3;
  template <class T>
  static constexpr T f(T x) {
    return x > T(0) ? x : T(0);
  }
  template <class T>
  static constexpr T df(T x) {
    return x > T(0) ? T(1) : T(0);
  }
};
struct Silu {
  static constexpr const char* name = "silu";
  static constexpr double low = -5, high = 5;
  template <class T>
  static constexpr T f(T x) {
    return x * math::sigmoid(x);
  }
  template <class T>
  static constexpr T df(T x) {
    const T s = math::sigmoid(x);
    return math::fma(x * s, T(1) - s, s);
  }
};
// GPT-2's GELU: x (1 + tanh u) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), which is x sigmoid(2u). Hendrycks and Gimpel
// 2016, section 2.
struct Gelu {
  static constexpr const char* name = "gelu";
  static constexpr double low = -4, high = 4;
  template <class T>
  static constexpr T twice_u(T x) {
    return x * math::fma(T(0.0713548162726009), x * x, T(1.5957691216057308));
  }
  template <class T>
  static constexpr T f(T x) {
    return x * math::sigmoid(twice_u(x));
  }
  template <class T>
  static constexpr T df(T x) {
    const T s = math::sigmoid(twice_u(x));
    const T slope = math::fma(T(0.2140644488178027), x * x, T(1.5957691216057308));
    return math::fma(x * s * (T(1) - s), slope, s);
  }
};
using UnaryOps = OpList<Neg, Exp, Log, Sqrt, Square, Reciprocal, Tanh, Sigmoid, Relu, Silu, Gelu>;

// Binary: y = f(a, b); da and db are the partial derivatives.
struct Add {
  static constexpr const char* name = "add";
  static constexpr double low = -3, high = 3;
  template <class T>
  static constexpr T f(T a, T b) {
    return a + b;
  }
  template <class T>
  static constexpr T da(T, T) {
    return T(1);
  }
  template <class T>
  static constexpr T db(T, T) {
    return T(1);
  }
};
struct Sub {
  static constexpr const char* name = "sub";
  static constexpr double low = -3, high = 3;
  template <class T>
  static constexpr T f(T a, T b) {
    return a - b;
  }
  template <class T>
  static constexpr T da(T, T) {
    return T(1);
  }
  template <class T>
  static constexpr T db(T, T) {
    return T(-1);
  }
};
struct Mul {
  static constexpr const char* name = "mul";
  static constexpr double low = -3, high = 3;
  template <class T>
  static constexpr T f(T a, T b) {
    return a * b;
  }
  template <class T>
  static constexpr T da(T, T b) {
    return b;
  }
  template <class T>
  static constexpr T db(T a, T) {
    return a;
  }
};
struct Div {
  static constexpr const char* name = "div";
  static constexpr double low = 0.3, high = 3;
  template <class T>
  static constexpr T f(T a, T b) {
    return a / b;
  }
  template <class T>
  static constexpr T da(T, T b) {
    return T(1) / b;
  }
  template <class T>
  static constexpr T db(T a, T b) {
    return -a / (b * b);
  }
};
struct Maximum {  // the gradient of a tie goes to a
  static constexpr const char* name = "maximum";
  static constexpr double low = -3, high = 3;
  template <class T>
  static constexpr T f(T a, T b) {
    return a >= b ? a : b;
  }
  template <class T>
  static constexpr T da(T a, T b) {
    return a >= b ? T(1) : T(0);
  }
  template <class T>
  static constexpr T db(T a, T b) {
    return a >= b ? T(0) : T(1);
  }
};
struct Minimum {
  static constexpr const char* name = "minimum";
  static constexpr double low = -3, high = 3;
  template <class T>
  static constexpr T f(T a, T b) {
    return a <= b ? a : b;
  }
  template <class T>
  static constexpr T da(T a, T b) {
    return a <= b ? T(1) : T(0);
  }
  template <class T>
  static constexpr T db(T a, T b) {
    return a <= b ? T(0) : T(1);
  }
};
using BinaryOps = OpList<Add, Sub, Mul, Div, Maximum, Minimum>;

}  // namespace tessera
