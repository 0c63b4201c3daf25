// What a reduction makes of two numbers, for the loops of the CPU and the kernel of the GPU.
#pragma once
#include "parallel/comm/call.h"
#include "tensor/dtype.h"

namespace tessera {

struct Plus {
  template <class T>
  constexpr T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  template <class T>
  constexpr T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

template <class F>
void with_reduction(Reduction reduction, const F& f) {
  if (reduction == Reduction::sum)
    f(Plus{});
  else
    f(Larger{});
}

}  // namespace tessera
