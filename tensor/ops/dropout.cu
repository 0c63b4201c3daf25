// If four adjacent elements in memory are adjacent in global order, each thread generates the Philox blocks that its
// elements share; otherwise one block per element.
#include <algorithm>
#include <cstdint>

#include "tensor/cuda/columns.cuh"
#include "tensor/ops/dropout.h"

namespace tessera::cuda {
namespace {

template <class T>
struct Dropout {
  using A = Accumulate<T>;
  const T* x;
  T* y;
  const int64_t* positions;
  Philox random;
  uint64_t step;
  const uint64_t* step_on_gpu;  // replaces `step` unless null
  int64_t first_sequence, tokens, tokens_total, channels_total, first_channel;
  float threshold;
  A up;
  Columns at;  // rows are tokens

  __device__ uint64_t now() const { return step_on_gpu ? *step_on_gpu : step; }
  __device__ uint64_t first_index(int64_t i) const {
    const int64_t sequence = i / tokens, token = i % tokens, position = positions ? positions[token] : token;
    return static_cast<uint64_t>(((first_sequence + sequence) * tokens_total + position) * channels_total +
                                 first_channel);
  }
  __device__ T apply(T v, uint32_t word) const {
    return Philox::to_uniform(word) >= threshold ? T(static_cast<A>(v) * up) : T(A(0));
  }
};

template <class T>
inline constexpr int kGroup = std::max(4, kVecElems<T>);  // elements per thread: full Philox blocks

template <class T>
__global__ void dropout_kernel(Dropout<T> f) {
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
    const Philox::Block words = f.random(first + static_cast<uint64_t>(b), step);
    for (int k = 0; k < 4; ++k) {
      T& e = v[(4 * b + k) / kVecElems<T>].v[(4 * b + k) % kVecElems<T>];
      e = f.apply(e, words[static_cast<size_t>(k)]);
    }
  }
  for (int p = 0; p < kVecs; ++p) store(to + p * kVecElems<T>, v[p]);
}

template <class T>
__global__ void dropout_each_kernel(Dropout<T> f) {
  const int64_t at = global_thread(), i = at / f.at.length;
  if (i >= f.at.rows) return;
  f.y[at] = f.apply(f.x[at], f.random.word(f.first_index(i) + static_cast<uint64_t>(at % f.at.length), f.now()));
}

}  // namespace

void dropout(const Tensor& y, const Tensor& x, double p, const DropoutTile& tile, const Tensor* positions) {
  const int64_t c = x.dim(2), rows = x.dim(0) * x.dim(1);
  if (x.numel() == 0) return;
  with_floating(x.dtype(), "dropout", [&](auto t) {
    using T = decltype(t);
    const Dropout<T> f{.x = x.device_data<T>(),
                       .y = y.device_data<T>(),
                       .positions = positions ? positions->device_data<int64_t>() : nullptr,
                       .random = tile.random,
                       .step = tile.step,
                       .step_on_gpu = tile.step_on_gpu,
                       .first_sequence = tile.first_sequence,
                       .tokens = x.dim(1),
                       .tokens_total = tile.tokens_total,
                       .channels_total = tile.channels_total,
                       .first_channel = tile.first_channel,
                       .threshold = static_cast<float>(p),
                       .up = static_cast<Accumulate<T>>(1 / (1 - p)),
                       .at = {rows, static_cast<int>(c)}};
    const bool together = c % kGroup<T> == 0 && tile.channels_total % 4 == 0 && tile.first_channel % 4 == 0;
    if (is_vectorizable<T>(c, f.x, f.y) && together)
      launch(context(x), "dropout", {.blocks = blocks_for(x.numel() / kGroup<T>, kThreads)}, dropout_kernel<T>, f);
    else
      launch(context(x), "dropout", {.blocks = blocks_for(x.numel(), kThreads)}, dropout_each_kernel<T>, f);
  });
}

}  // namespace tessera::cuda
