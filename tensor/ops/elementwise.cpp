// Argument checks and CPU loops of the elementwise ops.
#include "tensor/ops/elementwise.h"

#include <string>
#include <tuple>

#include "tensor/cpu/loops.h"
#include "tensor/ops/reduce.h"

namespace tessera {
namespace {

void check_same(const char* op, const Tensor& a, const Tensor& b) {
  if (a.dtype() != b.dtype())
    throw Error(std::string("[") + op + "] dtypes differ: " + a.describe() + " and " + b.describe());
}

template <class Y, class... X, class Kernel, class... In>
void map_rounded(const Kernel& kernel, const Tensor& y, const In&... in) {
  cpu::map<Y, X...>([kernel](X... x) { return Y(kernel(static_cast<Accumulate<X>>(x)...)); }, y, in...);
}

template <class T, class>
using Same = T;

template <class Kernel, class... In>
void run(const Kernel& kernel, const Tensor& y, const In&... in) {
  const auto on_cpu = [&] {
    with_floating(y.dtype(), Kernel::name, [&]<class T>(T) { map_rounded<T, Same<T, In>...>(kernel, y, in...); });
  };
  on_device(y.device(), on_cpu, [&] { cuda::run(kernel, y, in...); });
}

}  // namespace

template <class Op>
Tensor unary(const Tensor& x) {
  Tensor y = x.make(x.shape());
  run(Value<Op>{}, y, x);
  return y;
}

template <class Op>
Tensor unary_backward(const Tensor& dy, const Tensor& x) {
  check_same(Op::name, dy, x);
  Tensor dx = x.make(x.shape());
  run(Slope<Op>{}, dx, dy.expand(x.shape()), x);
  return dx;
}

template <class Op>
Tensor binary(const Tensor& a, const Tensor& b) {
  check_same(Op::name, a, b);
  const Shape shape = broadcast(a.shape(), b.shape(), Op::name);
  Tensor y = a.make(shape);
  run(Value<Op>{}, y, a.expand(shape), b.expand(shape));
  return y;
}

template <class Op>
Tensor binary_backward(const Tensor& dy, const Tensor& a_any, const Tensor& b_any, int operand) {
  check_same(Op::name, a_any, b_any);
  const Tensor a = a_any.expand(dy.shape()), b = b_any.expand(dy.shape()), partial = a.make(dy.shape());
  if (operand == 0)
    run(Partial<Op, 0>{}, partial, a, b);
  else
    run(Partial<Op, 1>{}, partial, a, b);
  run(Value<Mul>{}, partial, partial, dy);
  return sum_to(partial, operand == 0 ? a_any.shape() : b_any.shape());
}

Tensor scale(const Tensor& x, double factor) {
  Tensor y = x.make(x.shape());
  run(Scaled{factor}, y, x);
  return y;
}

void scale_(Tensor& x, double factor) { run(Scaled{factor}, x, x); }

void add_(Tensor& x, const Tensor& y_any, double factor) {
  const Tensor y = y_any.expand(x.shape());
  const AddScaled kernel{factor};
  const auto on_cpu = [&] {
    with_floating(x.dtype(), kernel.name, [&](auto t) {
      with_floating(y.dtype(), kernel.name,
                    [&](auto u) { map_rounded<decltype(t), decltype(t), decltype(u)>(kernel, x, x, y); });
    });
  };
  on_device(x.device(), on_cpu, [&] { cuda::run(kernel, x, x, y); });
}

// Instantiates the functions above for every op; taking their addresses keeps them in the library.
template <class... Ops>
auto instantiate_unary(OpList<Ops...>) {
  return std::tuple(&unary<Ops>..., &unary_backward<Ops>...);
}
template <class... Ops>
auto instantiate_binary(OpList<Ops...>) {
  return std::tuple(&binary<Ops>..., &binary_backward<Ops>...);
}
template auto instantiate_unary(UnaryOps);
template auto instantiate_binary(BinaryOps);

}  // namespace tessera
