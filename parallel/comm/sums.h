// Sums over ranks, element by element, in a defined order: float32 and narrower in float32 and rounded once.
#pragma once
#include <cstddef>
#include <span>

#include "parallel/comm/call.h"
#include "tensor/dtype.h"

namespace tessera {

// out[k][i] = in[0][i] + in[1][i] + ... (or the largest) for every k and every i of the range, added from left to
// right. in[k] and out[k] may be the same memory. The pointers are to element 0.
void reduce_ranks(DType dtype, Reduction reduction, std::span<const std::byte* const> in,
                  std::span<std::byte* const> out, Range range);

// total[i] = total[i] + x[i] (or the larger) for `count` elements, rounded to the dtype.
void reduce_into(DType dtype, Reduction reduction, std::byte* total, const std::byte* x, int64_t count);

// The reductions of two numbers, for the loops of the CPU and the kernel of the GPU.

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
