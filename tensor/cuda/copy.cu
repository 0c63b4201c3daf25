// Copies, conversions and fills on a GPU.
#include "tensor/cuda/copy.h"
#include "tensor/cuda/loops.cuh"

namespace tessera::cuda {
namespace {

template <class To, class From>
struct Convert {
  __device__ To operator()(From x) const { return converted<To>(x); }
};

template <class T>
struct Constant {
  T value;
  __device__ T operator()() const { return value; }
};

}  // namespace

void copy_bytes(const Tensor& to, const Tensor& from) {
  const Tensor& on_gpu = to.device() == Device::cuda ? to : from;
  Context& c = context(on_gpu);
  c.queued("copy", cudaMemcpyAsync(to.address(), from.address(), static_cast<size_t>(from.nbytes()), cudaMemcpyDefault,
                                   c.stream()));
  c.synchronize();
}

void copy(const Tensor& to, const Tensor& from) {
  with_dtype(to.dtype(), [&](auto t) {
    with_dtype(from.dtype(), [&](auto f) {
      using T = decltype(t);
      using F = decltype(f);
      map<T, F>("copy", Convert<T, F>{}, to, from);
    });
  });
}

void synchronize(Arena& arena) { arena.local<Context>().synchronize(); }

void fill(const Tensor& t, double value) {
  with_dtype(t.dtype(), [&](auto zero) {
    using T = decltype(zero);
    map<T>("fill", Constant<T>{converted<T>(value)}, t);
  });
}

}  // namespace tessera::cuda
