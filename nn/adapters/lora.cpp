// Low-rank matmuls, added to the output of an adapted layer.
#include "nn/adapters/lora.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>

namespace tessera {

namespace {

// Standard deviation of U(-1 / sqrt(in), 1 / sqrt(in)), the default initialization of A.
double default_deviation(int64_t in) { return 1 / std::sqrt(3.0 * static_cast<double>(in)); }

}  // namespace

Lora::Lora(int64_t in, int64_t first, int64_t out, const LoraOptions& o)
    : a(child<Linear>("lora_A", in, o.rank, Linear::Options{.bias = false, .deviation = default_deviation(in)})),
      b(child<Linear>("lora_B", o.rank, out, Linear::Options{.bias = false, .deviation = o.starts_idle ? 0 : 0.02})),
      drop(child<Dropout>("drop", o.dropout)),
      first_(first),
      first_here_(first),
      scale_(o.scale) {}

void Lora::place(int64_t first_here, std::function<Var(Var)> between) {
  first_here_ = first_here;
  between_ = std::move(between);
}

Var Lora::add_to(Var y, const Var& x) {
  Var low = a(drop.apply(x));
  if (between_) low = between_(std::move(low));
  return add_columns(std::move(y), first_here_, b(scale(low, scale_)));
}

}  // namespace tessera
