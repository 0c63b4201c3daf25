// GPU loop of the elementwise kernels, instantiated for each kernel.
#include <tuple>
#include <type_traits>

#include "tensor/cuda/loops.cuh"
#include "tensor/ops/elementwise.h"

namespace tessera::cuda {
namespace {

template <class T, class Kernel>
struct Rounded {
  Kernel kernel;
  template <class... X>
  __device__ T operator()(X... x) const {
    return T(kernel(static_cast<Accumulate<X>>(x)...));
  }
};

template <class T, class>
using Same = T;

}  // namespace

template <class Kernel, class... In>
void run(const Kernel& kernel, const Tensor& y, const In&... in) {
  const auto queue = [&](auto t) {
    using T = decltype(t);
    map<T, Same<T, In>...>(Kernel::name, Rounded<T, Kernel>{kernel}, y, in...);
  };
  if constexpr (std::is_same_v<Kernel, Value<Add>> || std::is_same_v<Kernel, Scaled>)
    tessera::with_floating(y.dtype(), Kernel::name, queue);  // every build adds and scales float64 losses
  else
    with_floating(y.dtype(), Kernel::name, queue);
}

template <>
void run(const AddScaled& kernel, const Tensor& to, const Tensor& x, const Tensor& y) {
  tessera::with_floating(x.dtype(), kernel.name, [&](auto t) {
    tessera::with_floating(y.dtype(), kernel.name, [&](auto u) {
      using T = decltype(t);
      map<T, T, decltype(u)>(AddScaled::name, Rounded<T, AddScaled>{kernel}, to, x, y);
    });
  });
}

// As in elementwise.cpp.
template <class... Ops>
auto instantiate_unary(OpList<Ops...>) {
  return std::tuple(&run<Value<Ops>, Tensor>..., &run<Slope<Ops>, Tensor, Tensor>...);
}
template <class... Ops>
auto instantiate_binary(OpList<Ops...>) {
  return std::tuple(&run<Value<Ops>, Tensor, Tensor>..., &run<Partial<Ops, 0>, Tensor, Tensor>...,
                    &run<Partial<Ops, 1>, Tensor, Tensor>...);
}
template auto instantiate_unary(UnaryOps);
template auto instantiate_binary(BinaryOps);
template void run(const Scaled&, const Tensor&, const Tensor&);

}  // namespace tessera::cuda
