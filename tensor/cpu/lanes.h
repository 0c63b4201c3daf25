// Sums and maxima along a row in sixteen fixed lanes: element i belongs to lane i mod 16, and the lanes are combined in
// pairs. So a row has the same bits on every instruction set, wherever it lies, and the loop is a vector loop.
#pragma once
#include <algorithm>
#include <cstdint>

namespace tessera::cpu {

inline constexpr int64_t kRowLanes = 16;

// The sum of f(i) for i in [0, n).
template <class A, class F>
inline A lane_sum(int64_t n, const F& f) {
  A lane[kRowLanes] = {};
  int64_t i = 0;
  for (; i + kRowLanes <= n; i += kRowLanes)
    for (int64_t l = 0; l < kRowLanes; ++l) lane[l] += f(i + l);
  for (int64_t l = 0; i + l < n; ++l) lane[l] += f(i + l);
  for (int64_t width = kRowLanes / 2; width > 0; width /= 2)
    for (int64_t l = 0; l < width; ++l) lane[l] += lane[l + width];
  return lane[0];
}

// The largest f(i), or `least` when that is larger.
template <class A, class F>
inline A lane_max(int64_t n, A least, const F& f) {
  A lane[kRowLanes];
  for (A& v : lane) v = least;
  int64_t i = 0;
  for (; i + kRowLanes <= n; i += kRowLanes)
    for (int64_t l = 0; l < kRowLanes; ++l) lane[l] = std::max(lane[l], f(i + l));
  for (int64_t l = 0; i + l < n; ++l) lane[l] = std::max(lane[l], f(i + l));
  A top = lane[0];
  for (A v : lane) top = std::max(top, v);
  return top;
}

}  // namespace tessera::cpu
