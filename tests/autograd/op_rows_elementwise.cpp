// Rows of the op table: every elementwise op of the lists, with broadcasting, and shape ops.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "tests/autograd/op_table.h"

namespace tessera::test {
namespace {

using Unary = double (*)(double);
using Binary = double (*)(double, double);

const std::map<std::string, Unary> kUnary = {
    {"neg", [](double x) { return -x; }},
    {"exp", [](double x) { return std::exp(x); }},
    {"log", [](double x) { return std::log(x); }},
    {"sqrt", [](double x) { return std::sqrt(x); }},
    {"square", [](double x) { return x * x; }},
    {"reciprocal", [](double x) { return 1 / x; }},
    {"tanh", [](double x) { return std::tanh(x); }},
    {"sigmoid", [](double x) { return 1 / (1 + std::exp(-x)); }},
    {"relu", [](double x) { return x > 0 ? x : 0; }},
    {"silu", [](double x) { return reference_activation(x, Activation::silu); }},
    {"gelu", [](double x) { return reference_activation(x, Activation::gelu); }},
    {"gelu_erf", [](double x) { return reference_activation(x, Activation::gelu_erf); }}};
const std::map<std::string, Binary> kBinary = {{"add", [](double a, double b) { return a + b; }},
                                               {"sub", [](double a, double b) { return a - b; }},
                                               {"mul", [](double a, double b) { return a * b; }},
                                               {"div", [](double a, double b) { return a / b; }},
                                               {"maximum", [](double a, double b) { return a > b ? a : b; }},
                                               {"minimum", [](double a, double b) { return a < b ? a : b; }}};

// Index of the operand element that is broadcast to element `element` of a result of shape `shape`.
size_t source(size_t element, const Shape& shape, const Shape& operand) {
  int64_t i = static_cast<int64_t>(element), at = 0, step = 1;
  for (int d = shape.ndim() - 1; d >= 0; --d) {
    const int64_t index = i % shape[d];
    i /= shape[d];
    const int own = d - (shape.ndim() - operand.ndim());
    if (own < 0) continue;
    if (operand[own] != 1) at += index * step;
    step *= operand[own];
  }
  return static_cast<size_t>(at);
}

template <class Op>
Problem sample_unary(Random& random) {
  const Shape shape = random.shape(static_cast<int>(random.between(1, 3)), 37);
  return {{{shape, Op::low, Op::high}},
          [](const std::vector<Var>& v) { return unary<Op>(v[0]); },
          [f = kUnary.at(Op::name)](const Values& v) {
            return elements(v[0].size(), [&](size_t i) { return f(v[0][i]); });
          },
          shape.ndim() > 1};
}

Problem broadcast_problem(Random& random, Binary f, double low, double high,
                          std::function<Var(const std::vector<Var>&)> op) {
  const Shape shape = random.shape(static_cast<int>(random.between(1, 3)), 21);
  Shape a = shape, b;
  for (int d = static_cast<int>(random.between(0, shape.ndim())); d < shape.ndim(); ++d) b.push_back(shape[d]);
  for (int d = 0; d < b.ndim(); ++d)
    if (random.between(0, 3) == 0) b[d] = 1;
  if (random.between(0, 1) == 1) std::swap(a, b);
  return {{{a, low, high}, {b, low, high}}, std::move(op), [=](const Values& v) {
            return elements(static_cast<size_t>(shape.numel()),
                            [&](size_t i) { return f(v[0][source(i, shape, a)], v[1][source(i, shape, b)]); });
          }};
}

template <class Op>
Problem sample_binary(Random& random) {
  const bool divides = std::string(Op::name) == "div";
  return broadcast_problem(random, kBinary.at(Op::name), divides ? 0.3 : -3, 3,
                           [](const std::vector<Var>& v) { return binary<Op>(v[0], v[1]); });
}

Problem sample_transpose(Random& random) {
  const Shape s = random.shape(3, 9);
  return {{{s}},
          [](const std::vector<Var>& v) { return transpose(v[0], 0, 2); },
          [s](const Values& v) {
            std::vector<double> y;
            for (int64_t k = 0; k < s[2]; ++k)
              for (int64_t j = 0; j < s[1]; ++j)
                for (int64_t i = 0; i < s[0]; ++i) y.push_back(v[0][static_cast<size_t>((i * s[1] + j) * s[2] + k)]);
            return y;
          }};
}

Problem sample_narrow(Random& random) {
  const Shape s = random.shape(2, 15);
  const int64_t start = random.between(0, s[1] - 1), length = random.between(1, s[1] - start);
  return {{{s}},
          [=](const std::vector<Var>& v) { return narrow(v[0], 1, start, length); },
          [=](const Values& v) {
            return elements(static_cast<size_t>(s[0] * length), [&](size_t at) {
              const auto i = static_cast<int64_t>(at);
              return v[0][static_cast<size_t>(i / length * s[1] + start + i % length)];
            });
          }};
}

Problem sample_add_columns(Random& random) {
  const Shape s = random.shape(2, 15);
  const int64_t first = random.between(0, s[1] - 1), width = random.between(1, s[1] - first);
  return {{{s}, {{s[0], width}}},
          [=](const std::vector<Var>& v) { return add_columns(scale(v[0], 1), first, v[1]); },
          [=](const Values& v) {
            std::vector<double> y = v[0];
            for (int64_t i = 0; i < s[0]; ++i)
              for (int64_t j = 0; j < width; ++j)
                y[static_cast<size_t>(i * s[1] + first + j)] += v[1][static_cast<size_t>(i * width + j)];
            return y;
          }};
}

Problem sample_reshape(Random& random) {
  const Shape s = random.shape(3, 9);
  return {{{s}},
          [](const std::vector<Var>& v) {
            return reshape(v[0], {-1, v[0].dim(2)});
          },
          [](const Values& v) { return v[0]; }};
}

Problem sample_sum(Random& random) {
  const Shape s = random.shape(2, 40);
  return {{{s, 0.5, 1.5}},
          [](const std::vector<Var>& v) { return sum(v[0]); },
          [](const Values& v) { return std::vector{std::accumulate(v[0].begin(), v[0].end(), 0.0)}; }};
}

Problem sample_scale(Random& random) {
  const Shape s = random.shape(2, 40);
  return {{{s}},
          [](const std::vector<Var>& v) { return scale(v[0], 2.5); },
          [](const Values& v) { return elements(v[0].size(), [&](size_t i) { return 2.5 * v[0][i]; }); },
          true};
}

}  // namespace

void add_elementwise_rows(std::vector<OpRow>& table) {
  UnaryOps::for_each([&](auto op) { table.push_back({decltype(op)::name, sample_unary<decltype(op)>}); });
  BinaryOps::for_each([&](auto op) { table.push_back({decltype(op)::name, sample_binary<decltype(op)>}); });
  table.push_back({"add in place", [](Random& random) {
                     return broadcast_problem(random, kBinary.at("add"), -3, 3,
                                              [](const std::vector<Var>& v) { return add(v[0], scale(v[1], 1)); });
                   }});
  table.insert(table.end(), {{"transpose", sample_transpose},
                             {"narrow", sample_narrow},
                             {"add_columns", sample_add_columns},
                             {"reshape", sample_reshape},
                             {"sum", sample_sum},
                             {"scale", sample_scale}});
}

}  // namespace tessera::test
