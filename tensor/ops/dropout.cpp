// CPU dropout: one Philox block serves four adjacent elements in global order.
#include "tensor/ops/dropout.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "tensor/cpu/vectorize.h"

namespace tessera {
namespace {

constexpr int kSampled = 64;  // values sampled at a time

template <class T>
void drop_row(const DropoutOperands<T>& f, int64_t i, int64_t c) {
  using A = Accumulate<T>;
  const T* const x = f.x + i * c;
  T* const y = f.y + i * c;
  const A up = f.up;
  const float threshold = f.threshold;
  float uniform[kSampled];
  for (int64_t j = 0; j < c; j += kSampled) {
    f.tile.random.template uniforms<kSampled>(f.first_index(i) + static_cast<uint64_t>(j), f.tile.step, uniform);
    for (int64_t k = 0; k < std::min<int64_t>(kSampled, c - j); ++k)
      y[j + k] = uniform[k] >= threshold ? T(static_cast<A>(x[j + k]) * up) : T(A(0));
  }
}

void dropout_on_cpu(const Tensor& y, const Tensor& x, double p, const DropoutTile& tile) {
  const int64_t c = x.dim(2);
  with_floating(x.dtype(), "dropout", [&]<class T>(T) {
    const DropoutOperands<T> f =
        make_dropout<T>(y, x, p, tile, tile.positions.empty() ? nullptr : tile.positions.data());
    cpu::parallel_for(x.dim(0) * x.dim(1), std::max<int64_t>(1, 1024 / std::max<int64_t>(c, 1)),
                      [&f, c](int64_t begin, int64_t end) {
                        for (int64_t i = begin; i < end; ++i) drop_row(f, i, c);
                      });
  });
}

}  // namespace

Tensor dropout(Tensor&& x_any, double p, const DropoutTile& tile) {
  if (x_any.ndim() != 3) throw Error("[dropout] x is " + x_any.describe() + "; expected (B, T, C)");
  if (!(p >= 0 && p < 1)) throw Error("[dropout] p is " + std::to_string(p) + "; expected a value in [0, 1)");
  const int64_t tokens = x_any.dim(1), c = x_any.dim(2);
  if (!tile.positions.empty() && static_cast<int64_t>(tile.positions.size()) != tokens)
    throw Error("[dropout] " + std::to_string(tile.positions.size()) + " positions for " + std::to_string(tokens) +
                " tokens");
  Tensor x = x_any.contiguous();
  x_any = Tensor();
  if (p == 0) return x;
  Tensor y = x.unique() ? x : x.make(x.shape());
  DropoutTile resolved = tile;
  if (resolved.tokens_total <= 0) resolved.tokens_total = tokens;
  if (resolved.channels_total <= 0) resolved.channels_total = c;
  const auto on_gpu = [&] {
    const Tensor positions =
        tile.positions.empty() ? Tensor() : Tensor::constant<int64_t>(tile.positions, {tokens}, x.arena());
    cuda::dropout(y, x, p, resolved, positions);
  };
  on_device(
      x.device(), [&] { dropout_on_cpu(y, x, p, resolved); }, on_gpu);
  return y;
}

}  // namespace tessera
