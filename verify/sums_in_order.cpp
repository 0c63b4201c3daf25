// An order for each algorithm, as its file documents it.
#include "verify/sums_in_order.h"

namespace tessera {
namespace {

template <class T>
T plus(T a, T b) {
  return static_cast<T>(static_cast<Accumulate<T>>(a) + static_cast<Accumulate<T>>(b));
}

// Rank order, in float32, rounded once.
template <class T>
T in_rank_order(const std::vector<const T*>& x, int64_t i) {
  auto sum = static_cast<Accumulate<T>>(x[0][i]);
  for (size_t r = 1; r < x.size(); ++r) sum += static_cast<Accumulate<T>>(x[r][i]);
  return static_cast<T>(sum);
}

// From `first` around, rounded at every step.
template <class T>
T around(const std::vector<const T*>& x, size_t first, int64_t i) {
  T sum = x[first % x.size()][i];
  for (size_t r = 1; r < x.size(); ++r) sum = plus(sum, x[(first + r) % x.size()][i]);
  return sum;
}

// Neighbours, neighbours of neighbours, ..., rounded at every step.
template <class T>
T in_pairs(const std::vector<const T*>& x, int64_t i) {
  std::vector<T> sums;
  for (const T* rank : x) sums.push_back(rank[i]);
  for (size_t step = 1; step < sums.size(); step *= 2)
    for (size_t r = 0; r + step < sums.size(); r += 2 * step) sums[r] = plus(sums[r], sums[r + step]);
  return sums[0];
}

template <class T>
void sum_reduction(const std::vector<const T*>& x, T* out, const Reduced& reduced, Algorithm algorithm) {
  const auto ranks = static_cast<int>(x.size());
  int owner = 0;  // of the piece that element i lies in
  for (int64_t i = reduced.range.begin; i < reduced.range.end; ++i) {
    while (i - reduced.range.begin >= piece(reduced.count, ranks, owner).end) ++owner;
    if (algorithm == Algorithm::ring)
      out[i] = around(x, static_cast<size_t>(owner) + 1, i);
    else
      out[i] = algorithm == Algorithm::tree ? in_pairs(x, i) : in_rank_order(x, i);
  }
}

}  // namespace

void add_to(const Tensor& total, const Tensor& x) {
  with_floating(total.dtype(), "reference", [&](auto t) {
    using T = decltype(t);
    T* const a = total.data<T>();
    const T* const b = x.data<T>();
    for (int64_t i = 0; i < total.numel(); ++i) a[i] = plus(a[i], b[i]);
  });
}

void sum_in_order(const std::vector<Tensor>& ranks, const Tensor& out, const Reduced& reduced, Algorithm algorithm) {
  with_floating(out.dtype(), "reference", [&](auto t) {
    using T = decltype(t);
    std::vector<const T*> x;
    for (const Tensor& rank : ranks) x.push_back(rank.data<T>());
    sum_reduction(x, out.data<T>(), reduced, algorithm);
  });
}

Tensor sum_over(const std::vector<Tensor>& ranks, const std::vector<Reduced>& reductions, Algorithm algorithm) {
  Tensor out = ranks[0].clone();
  for (const Reduced& reduced : reductions)
    if (ranks.size() > 1) sum_in_order(ranks, out, reduced, algorithm);
  return out;
}

}  // namespace tessera
