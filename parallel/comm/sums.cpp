// Sums of ranks in tiles that stay in the first cache.
#include "parallel/comm/sums.h"

#include <algorithm>

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
    for (int64_t begin = range.begin; begin < range.end; begin += kTile)
      tile(begin, std::min(kTile, range.end - begin));
  }

 private:
  const T* from(size_t k, int64_t begin) const { return reinterpret_cast<const T*>(in[k]) + begin; }

  // Sums are kept wide until the last array, whose sum goes straight to the first output, so that two ranks' arrays are
  // read once and written once. What is written is read before, at the same index or not at all.
  void tile(int64_t begin, int64_t n) const {
    Accumulate<T> total[kTile];
    T* const first = reinterpret_cast<T*>(out[0]) + begin;
    const size_t last = in.size() - 1;
    if (last == 0) {
      std::copy(from(0, begin), from(0, begin) + n, first);
    } else if (last == 1) {
      add(from(0, begin), from(1, begin), first, n);
    } else {
      add(from(0, begin), from(1, begin), total, n);
      for (size_t k = 2; k < last; ++k) add(static_cast<const Accumulate<T>*>(total), from(k, begin), total, n);
      add(static_cast<const Accumulate<T>*>(total), from(last, begin), first, n);
    }
    for (std::byte* o : out.subspan(1)) {
      T* const y = reinterpret_cast<T*>(o) + begin;
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) y[i] = first[i];
    }
  }

  template <class A, class To>
  static void add(const A* a, const T* b, To* to, int64_t n) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i)
      to[i] = static_cast<To>(Combine{}(static_cast<Accumulate<T>>(a[i]), static_cast<Accumulate<T>>(b[i])));
  }
};

template <class T, class Combine>
struct ReduceInto {
  T* total;
  const T* x;
  int64_t count;
  void operator()() const {
    for (int64_t i = 0; i < count; ++i)
      total[i] = static_cast<T>(Combine{}(static_cast<Accumulate<T>>(total[i]), static_cast<Accumulate<T>>(x[i])));
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
