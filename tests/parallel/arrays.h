// Arrays that ranks bring to a collective, and what must come out.
#pragma once
#include <vector>

#include "parallel/comm/launch.h"

namespace tessera::test {

// What rank r brings: whole numbers, whose sums are exact in every order and dtype.
inline double brought(int rank, int64_t i) { return static_cast<double>((i * 7 + rank * 3) % 5); }

inline Tensor array_of(int rank, int64_t n, DType dtype, const ArenaPtr& arena) {
  std::vector<double> v(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) v[static_cast<size_t>(i)] = brought(rank, i);
  return Tensor::of<double>(v, {n}, arena).to(dtype).to(arena);
}

inline std::vector<double> values(const Tensor& t) { return t.on_host().to(DType::float64).to_vector<double>(); }

inline std::vector<double> summed(int ranks, int64_t n) {
  std::vector<double> total(static_cast<size_t>(n));
  for (int r = 0; r < ranks; ++r)
    for (int64_t i = 0; i < n; ++i) total[static_cast<size_t>(i)] += brought(r, i);
  return total;
}

inline std::vector<double> cut(const std::vector<double>& whole, int ranks, int rank) {
  const Range p = piece(static_cast<int64_t>(whole.size()), ranks, rank);
  return {whole.begin() + p.begin, whole.begin() + p.end};
}

}  // namespace tessera::test
