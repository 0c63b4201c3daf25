// Bitwise identical to the CPU: a thread processes 16 bytes of adjacent pairs in a few heads of a token, and reads
// their angles once.
#include <numeric>

#include "tensor/cuda/rows.cuh"
#include "tensor/math.h"
#include "tensor/ops/rotary.h"

namespace tessera::cuda {
namespace {

constexpr int kHeadsTogether = 4;

template <class T>
struct Rotation {
  const T* x;
  T* y;
  const Accumulate<T>* table;
  const int32_t* positions;                    // null: first, first + 1, ...
  int64_t first, rows, tokens, placed, width;  // placed: rows with explicit positions
  int heads, half;
  Accumulate<T> sign;
  constexpr int parts() const { return (half + kVecElems<T> - 1) / kVecElems<T>; }
  constexpr int runs() const { return (heads + kHeadsTogether - 1) / kHeadsTogether; }
};

template <class T>
struct Angles {
  Accumulate<T> v[kVecElems<T>];
};
template <bool kVectorized, class T>
__device__ Angles<T> load_angles(const Accumulate<T>* row, int j, int half) {
  constexpr int kPiece = kVecElems<Accumulate<T>>;
  Angles<T> angles;
  for (int p = 0; p < kVecElems<T>; p += kPiece) {
    const auto piece = load_part<kVectorized>(row, j + p, half);
    for (int k = 0; k < kPiece; ++k) angles.v[p + k] = piece.v[k];
  }
  return angles;
}

template <class T, bool kVectorized>
__global__ void rotate_kernel(Rotation<T> f) {
  using A = Accumulate<T>;
  const int64_t thread = global_thread(), row = thread / f.parts() / f.runs();
  if (row >= f.rows) return;
  const int j = static_cast<int>(thread % f.parts()) * kVecElems<T>,
            run = static_cast<int>(thread / f.parts() % f.runs());
  const A* const angles = f.table + (f.positions ? f.positions[row % f.placed] : f.first + row % f.tokens) * 2 * f.half;
  const Angles<T> cosines = load_angles<kVectorized, T>(angles, j, f.half),
                  sines = load_angles<kVectorized, T>(angles + f.half, j, f.half);
  for (int h = run; h < f.heads; h += f.runs()) {
    const int64_t head = row * f.width + int64_t{2} * h * f.half;
    auto left = load_part<kVectorized>(f.x + head, j, f.half),
         right = load_part<kVectorized>(f.x + head + f.half, j, f.half);
    for (int k = 0; k < kVecElems<T>; ++k) {
      const A a = static_cast<A>(left.v[k]), b = static_cast<A>(right.v[k]), c = cosines.v[k], s = f.sign * sines.v[k];
      left.v[k] = T(math::fma(a, c, -(b * s)));
      right.v[k] = T(math::fma(b, c, a * s));
    }
    store_part<kVectorized>(f.y + head, j, f.half, left);
    store_part<kVectorized>(f.y + head + f.half, j, f.half, right);
  }
}

}  // namespace

void rotate(const Tensor& y, const Tensor& x, const RopeArgs& turn) {
  const int64_t d = turn.table.dim(1), width = x.dim(2), turned = turn.heads * d;
  with_floating(x.dtype(), "rotate", [&](auto t) {
    using T = decltype(t);
    const Rotation<T> f{.x = x.device_data<T>(),
                        .y = y.device_data<T>(),
                        .table = turn.table.device_data<Accumulate<T>>(),
                        .positions = turn.positions.defined() ? turn.positions.device_data<int32_t>() : nullptr,
                        .first = turn.first,
                        .rows = x.dim(0) * x.dim(1),
                        .tokens = x.dim(1),
                        .placed = turn.positions.defined() ? turn.positions.numel() : x.dim(1),
                        .width = width,
                        .heads = static_cast<int>(turn.heads),
                        .half = static_cast<int>(d / 2),
                        .sign = turn.back ? Accumulate<T>(-1) : Accumulate<T>(1)};
    const bool vectorized = is_vectorizable<T>(std::gcd(d / 2, width), f.x, f.y, f.table);
    launch(context(x), "rotate", {.blocks = blocks_for(f.rows * f.runs() * f.parts(), kThreads)},
           vectorized ? rotate_kernel<T, true> : rotate_kernel<T, false>, f);
    if (f.x != f.y && turned < width)
      y.narrow(2, turned, width - turned).copy_from(x.narrow(2, turned, width - turned));
  });
}

}  // namespace tessera::cuda
