// Sums of ranks in tiles that stay in the first cache.
#include "parallel/comm/sums.h"

#include <algorithm>

#include "parallel/comm/combine.h"
#include "tensor/cpu/vectorize.h"
#include "tensor/tensor.h"

namespace tessera {
namespace {

constexpr int64_t kTile = 1024;

template <class T, class Combine>
struct ReduceRanks {
  std::span<const std::byte* const> in;
  std::span<std::byte* const> out;
  Range range;
  void operator()() const {
    for (int64_t begin = range.begin; begin < range.end; begin += kTile) {
      const int64_t n = std::min(kTile, range.end - begin);
      Wide<T> total[kTile];
      const T* const first = reinterpret_cast<const T*>(in[0]) + begin;
      for (int64_t i = 0; i < n; ++i) total[i] = static_cast<Wide<T>>(first[i]);
      for (size_t k = 1; k < in.size(); ++k) {
        const T* const x = reinterpret_cast<const T*>(in[k]) + begin;
        for (int64_t i = 0; i < n; ++i) total[i] = Combine{}(total[i], static_cast<Wide<T>>(x[i]));
      }
      for (std::byte* o : out) {
        T* const y = reinterpret_cast<T*>(o) + begin;
        for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>(total[i]);
      }
    }
  }
};

template <class T, class Combine>
struct ReduceInto {
  T* total;
  const T* x;
  int64_t count;
  void operator()() const {
    for (int64_t i = 0; i < count; ++i)
      total[i] = static_cast<T>(Combine{}(static_cast<Wide<T>>(total[i]), static_cast<Wide<T>>(x[i])));
  }
};

}  // namespace

void reduce_ranks(DType dtype, Reduction reduction, std::span<const std::byte* const> in,
                  std::span<std::byte* const> out, Range range) {
  with_dtype(dtype, [&](auto t) {
    with_reduction(reduction, [&](auto combine) {
      cpu::vectorized(ReduceRanks<decltype(t), decltype(combine)>{in, out, range});
    });
  });
}

void reduce_into(DType dtype, Reduction reduction, std::byte* total, const std::byte* x, int64_t count) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    with_reduction(reduction, [&](auto combine) {
      cpu::vectorized(
          ReduceInto<T, decltype(combine)>{reinterpret_cast<T*>(total), reinterpret_cast<const T*>(x), count});
    });
  });
}

}  // namespace tessera
