// GPU dropout. If four adjacent elements in memory are adjacent in global order, a thread generates one Philox block
// for all four; otherwise one block per element.
#include <algorithm>
#include <cstdint>

#include "tensor/cuda/columns.cuh"
#include "tensor/ops/dropout.h"

namespace tessera::cuda {
namespace {

template <class T>
struct ColumnDropout : DropoutOperands<T> {
  using A = Accumulate<T>;
  Columns at;  // rows are tokens

  __device__ uint64_t now() const { return this->tile.step_on_gpu ? *this->tile.step_on_gpu : this->tile.step; }
  __device__ T apply(T v, uint32_t word) const {
    return Philox::to_uniform(word) >= this->threshold ? T(static_cast<A>(v) * this->up) : T(A(0));
  }
};

template <class T>
inline constexpr int kGroup = std::max(4, kVecElems<T>);  // elements per thread: full Philox blocks

template <class T>
__global__ void dropout_kernel(ColumnDropout<T> f) {
  constexpr int kVecs = kGroup<T> / kVecElems<T>;
  const int64_t groups = f.at.length / kGroup<T>, i = global_thread() / groups;
  if (i >= f.at.rows) return;
  const int64_t j = global_thread() % groups * kGroup<T>;
  const T* const from = f.x + i * f.at.length + j;
  T* const to = f.y + i * f.at.length + j;
  Packed<T, kVecElems<T>> v[kVecs];
  for (int p = 0; p < kVecs; ++p) v[p] = load<kVecElems<T>>(from + p * kVecElems<T>);
  const uint64_t first = (f.first_index(i) + static_cast<uint64_t>(j)) / 4, step = f.now();
  for (int b = 0; b < kGroup<T> / 4; ++b) {
    const Philox::Block words = f.tile.random(first + static_cast<uint64_t>(b), step);
    for (int k = 0; k < 4; ++k) {
      T& e = v[(4 * b + k) / kVecElems<T>].v[(4 * b + k) % kVecElems<T>];
      e = f.apply(e, words[static_cast<size_t>(k)]);
    }
  }
  for (int p = 0; p < kVecs; ++p) store(to + p * kVecElems<T>, v[p]);
}

template <class T>
__global__ void dropout_each_kernel(ColumnDropout<T> f) {
  const int64_t at = global_thread(), i = at / f.at.length;
  if (i >= f.at.rows) return;
  f.y[at] = f.apply(f.x[at], f.tile.random.word(f.first_index(i) + static_cast<uint64_t>(at % f.at.length), f.now()));
}

}  // namespace

void dropout(const Tensor& y, const Tensor& x, double p, const DropoutTile& tile, const Tensor& positions) {
  const int64_t c = x.dim(2), rows = x.dim(0) * x.dim(1);
  if (x.numel() == 0) return;
  with_floating(x.dtype(), "dropout", [&](auto t) {
    using T = decltype(t);
    const ColumnDropout<T> f{make_dropout<T>(y, x, p, tile, positions.data_on<int64_t>(Device::cuda)),
                             {rows, static_cast<int>(c)}};
    const bool together = c % kGroup<T> == 0 && tile.channels_total % 4 == 0 && tile.first_channel % 4 == 0;
    if (is_vectorizable<T>(c, f.x, f.y) && together)
      launch(context(x), "dropout", {.blocks = blocks_for(x.numel() / kGroup<T>, kThreads)}, dropout_kernel<T>, f);
    else
      launch(context(x), "dropout", {.blocks = blocks_for(x.numel(), kThreads)}, dropout_each_kernel<T>, f);
  });
}

}  // namespace tessera::cuda
