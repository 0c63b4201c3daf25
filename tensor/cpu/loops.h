// Elementwise loops over broadcast, strided operands; contiguous dims are merged.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <tuple>
#include <utility>

#include "tensor/cpu/vectorize.h"
#include "tensor/tensor.h"

namespace tessera::cpu {

struct Row {
  std::array<int64_t, kMaxOperands> at{};  // offset of each operand's first element
  std::array<int64_t, kMaxOperands> step{};
  int64_t n = 0;
};

// Calls f on the rank's threads for each inner row, or segment of a row, of operands expanded to one shape.
void for_each_row(std::span<const Tensor* const> operands, const std::function<void(const Row&)>& f);

template <class F, class Y, class... X>
void map_run(int64_t n, const F& f, Y* y, const X*... x) {
  vectorized([f, n, y, x...] {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[i] = f(x[i]...);
  });
}
template <class F, class Y, class... X, size_t... K>
void map_row(std::index_sequence<K...>, const Row row, const F& f, Y* y, const X*... x) {
  if (row.step[0] == 1 && ((row.step[1 + K] == 1) && ...)) return map_run(row.n, f, y, x...);
  for (int64_t i = 0; i < row.n; ++i) y[i * row.step[0]] = f(x[i * row.step[1 + K]]...);
}
template <class F, class Y, class... X, size_t... K>
void map_from(std::index_sequence<K...> all, const Row& row, const F& f, Y* y, const X*... x) {
  map_row(all, row, f, y + row.at[0], x + row.at[1 + K]...);
}

// y = f(x...): map<Y, X...>(f, y, x...) with explicit element types and operands of y's shape; y may be an operand.
template <class Y, class... X, class F, class... In>
void map(const F& f, const Tensor& y, const In&... in) {
  const std::tuple<Y*, const X*...> all(y.data<Y>(), in.template data<X>()...);
  for_each_row(std::array<const Tensor*, 1 + sizeof...(In)>{&y, &in...}, [&](const Row& row) {
    std::apply([&](auto*... p) { map_from(std::index_sequence_for<X...>{}, row, f, p...); }, all);
  });
}

// Number of rows of `width` elements that amortizes waking a thread.
inline int64_t rows_per_task(int64_t width) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(width, 1)); }

template <class F>
void for_rows(int64_t n, int64_t width, const F& f) {
  parallel_for(n, rows_per_task(width), [&f](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// Row reductions in sixteen fixed lanes, element i in lane i mod 16, combined in pairs: bitwise identical on every
// instruction set and at any position.

inline constexpr int64_t kRowLanes = 16;

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

template <class A, class F>
inline A lane_max(int64_t n, A lowest, const F& f) {
  A lane[kRowLanes];
  for (A& v : lane) v = lowest;
  int64_t i = 0;
  for (; i + kRowLanes <= n; i += kRowLanes)
    for (int64_t l = 0; l < kRowLanes; ++l) lane[l] = std::max(lane[l], f(i + l));
  for (int64_t l = 0; i + l < n; ++l) lane[l] = std::max(lane[l], f(i + l));
  A top = lane[0];
  for (A v : lane) top = std::max(top, v);
  return top;
}

}  // namespace tessera::cpu

namespace tessera {

// Device that an arena represents in a dry run (cpu::DryRun), for ops whose memory use differs: on a GPU logits are
// stored in full, and matmuls and attention allocate only their results. Workspaces of GPU libraries are not counted.
struct DryRunDevice {
  Device device = Device::cpu;
};
inline bool dry_run_on_gpu(const Tensor& t) {
  return cpu::DryRun::here() && t.arena()->local<DryRunDevice>().device == Device::cuda;
}

}  // namespace tessera
