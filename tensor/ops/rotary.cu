// GPU rotation, bitwise identical to the CPU's: a thread processes 16 bytes of adjacent pairs in a few heads of a
// token, and reads their angles once.
#include <cstdint>
#include <numeric>

#include "tensor/cuda/rows.cuh"
#include "tensor/math.h"
#include "tensor/ops/rotary.h"

namespace tessera::cuda {
namespace {

constexpr int kHeadsTogether = 4;

template <class T>
struct VectorRotation : Rotation<T> {
  constexpr int vectors() const { return (this->half + kVecElems<T> - 1) / kVecElems<T>; }
  constexpr int runs() const { return (this->heads + kHeadsTogether - 1) / kHeadsTogether; }
};

template <class T>
struct Angles {
  Accumulate<T> v[kVecElems<T>];
};
template <bool kVectorized, class T>
__device__ Angles<T> load_angles(const Accumulate<T>* row, int j, int half) {
  constexpr int kLoaded = kVecElems<Accumulate<T>>;
  Angles<T> angles;
  for (int p = 0; p < kVecElems<T>; p += kLoaded) {
    const auto packed = load_vector<kVectorized>(row, j + p, half);
    for (int k = 0; k < kLoaded; ++k) angles.v[p + k] = packed.v[k];
  }
  return angles;
}

template <class T, bool kVectorized>
__global__ void rotate_kernel(VectorRotation<T> f) {
  using A = Accumulate<T>;
  const int64_t thread = global_thread(), row = thread / f.vectors() / f.runs();
  if (row >= f.rows) return;
  const int j = static_cast<int>(thread % f.vectors()) * kVecElems<T>,
            run = static_cast<int>(thread / f.vectors() % f.runs());
  const A* const angles = f.angles(row);
  const Angles<T> cosines = load_angles<kVectorized, T>(angles, j, f.half),
                  sines = load_angles<kVectorized, T>(angles + f.half, j, f.half);
  for (int h = run; h < f.heads; h += f.runs()) {
    const int64_t head = row * f.width + int64_t{2} * h * f.half;
    auto left = load_vector<kVectorized>(f.x + head, j, f.half),
         right = load_vector<kVectorized>(f.x + head + f.half, j, f.half);
    for (int k = 0; k < kVecElems<T>; ++k) {
      const A a = static_cast<A>(left.v[k]), b = static_cast<A>(right.v[k]), c = cosines.v[k], s = f.sign * sines.v[k];
      left.v[k] = T(math::fma(a, c, -(b * s)));
      right.v[k] = T(math::fma(b, c, a * s));
    }
    store_vector<kVectorized>(f.y + head, j, f.half, left);
    store_vector<kVectorized>(f.y + head + f.half, j, f.half, right);
  }
}

}  // namespace

void rotate(const Tensor& y, const Tensor& x, const RopeArgs& rope) {
  const int64_t d = rope.table.dim(1), width = x.dim(2), rotated = rope.heads * d;
  with_floating(x.dtype(), "rotate", [&](auto t) {
    using T = decltype(t);
    const VectorRotation<T> f{make_rotation<T>(y, x, rope)};
    const bool vectorized = is_vectorizable<T>(std::gcd(d / 2, width), f.x, f.y, f.table);
    launch(context(x), "rotate", {.blocks = blocks_for(f.rows * f.runs() * f.vectors(), kThreads)},
           vectorized ? rotate_kernel<T, true> : rotate_kernel<T, false>, f);
    if (f.x != f.y && rotated < width)
      y.narrow(2, rotated, width - rotated).copy_from(x.narrow(2, rotated, width - rotated));
  });
}

}  // namespace tessera::cuda
