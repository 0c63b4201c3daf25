// Grouped GEMM on a GPU, shared by all dtypes. A line is a row of the left or a column of the right operand; an output
// element is the dot product of two lines. A launch computes the tiles of all groups.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "tensor/cuda/launch.cuh"
#include "tensor/ops/experts/experts.h"

namespace tessera::cuda {

inline constexpr int kMaxGroups = 192;

// `left` and `other` span all groups, `own` is a matrix per group. For weight gradients `other` is the right operand
// and `own` the output; otherwise vice versa.
template <class T, class Out, bool kOfWeights>
struct GroupedCall {
  const T* left;
  std::conditional_t<kOfWeights, const T*, Out*> other;
  int left_width, other_width;
  int groups = 0;
  int row[kMaxGroups + 1] = {}, tile[kMaxGroups + 1] = {};  // first row and tile per group, and the end
  std::conditional_t<kOfWeights, Out*, const T*> own[kMaxGroups] = {};
  bool adds[kMaxGroups] = {};
};
static_assert(sizeof(GroupedCall<float, float, true>) <= 4096, "kernel parameters are limited to 4 KiB on some GPUs");

template <class T, class Out>
struct GroupOperands {
  const T *left, *right;
  Out* out;
  int rows, columns, inner;
  bool adds;
};
template <class T, class Out, bool kOfWeights>
__device__ GroupOperands<T, Out> load_factors(const GroupedCall<T, Out, kOfWeights>& call, int group) {
  const int first = call.row[group], rows = call.row[group + 1] - first;
  const auto left = call.left + static_cast<int64_t>(first) * call.left_width;
  const auto other = call.other + static_cast<int64_t>(first) * call.other_width;
  if constexpr (kOfWeights)
    return {left, other, call.own[group], call.left_width, call.other_width, rows, call.adds[group]};
  else
    return {left, call.own[group], other, rows, call.other_width, call.left_width, false};
}

// Adjacent blocks share the lines of the right operand.
struct GroupTile {
  int group, row, column;
};
template <int kTile, class T, class Out, bool kOfWeights>
__device__ GroupTile find_tile(const GroupedCall<T, Out, kOfWeights>& call, int block) {
  int group = 0;
  for (int end = call.groups; end - group > 1;) {
    const int middle = (group + end) / 2;
    (call.tile[middle] <= block ? group : end) = middle;
  }
  const int rows = kOfWeights ? call.left_width : call.row[group + 1] - call.row[group];
  const int down = (rows + kTile - 1) / kTile, at = block - call.tile[group];
  return {group, at % down * kTile, at / down * kTile};
}

inline int64_t tiles_in(GemmKind which, const GemmGroup& group, const Tensor& left, const Tensor& other, int64_t tile) {
  const bool of_weights = which == GemmKind::weight_grad;
  if (of_weights && !group.w.defined()) return 0;
  return blocks_for(of_weights ? left.dim(1) : group.rows, tile) * blocks_for(other.dim(1), tile);
}

// Whether to halve the tiles' side: larger tiles would leave multiprocessors idle, or extend beyond the matrices by
// more than a quarter of their area. Results are bitwise identical.
inline bool small_tiles(GemmKind which, const Tensor& left, const Tensor& other, const std::vector<GemmGroup>& groups,
                        int64_t large) {
  constexpr int64_t kFewBlocks = 128;
  int64_t of_large = 0, of_small = 0;
  for (const GemmGroup& group : groups) {
    of_large += tiles_in(which, group, left, other, large);
    of_small += tiles_in(which, group, left, other, large / 2);
  }
  return of_large < kFewBlocks || of_small < 3 * of_large;
}

template <class T, class Out, bool kOfWeights, class F>
void for_each_launch(GemmKind which, const Tensor& left, const Tensor& other, const std::vector<GemmGroup>& groups,
                     int64_t tile, const F& f) {
  GroupedCall<T, Out, kOfWeights> call{.left = left.device_data<T>(),
                                       .other = other.device_data<std::conditional_t<kOfWeights, T, Out>>(),
                                       .left_width = static_cast<int>(left.dim(1)),
                                       .other_width = static_cast<int>(other.dim(1))};
  int64_t row = 0;
  for (size_t begin = 0; begin < groups.size(); begin += kMaxGroups) {
    call.groups = static_cast<int>(std::min<size_t>(kMaxGroups, groups.size() - begin));
    int64_t tiles = 0;
    for (int g = 0; g < call.groups; ++g) {
      const GemmGroup& group = groups[begin + static_cast<size_t>(g)];
      call.row[g] = static_cast<int>(row);
      call.tile[g] = static_cast<int>(tiles);
      call.own[g] = group.w.defined() ? group.w.device_data<std::conditional_t<kOfWeights, Out, T>>() : nullptr;
      call.adds[g] = group.adds;
      row += group.rows;
      tiles += tiles_in(which, group, left, other, tile);
    }
    call.row[call.groups] = static_cast<int>(row);
    call.tile[call.groups] = static_cast<int>(tiles);
    f(call, tiles);
  }
}

// Calls f with whether left and right lines are contiguous.
template <class F>
void with_lines(GemmKind which, const F& f) {
  if (which == GemmKind::forward)
    f(std::true_type{}, std::true_type{});
  else if (which == GemmKind::input_grad)
    f(std::true_type{}, std::false_type{});
  else
    f(std::false_type{}, std::false_type{});
}

void grouped_gemm_bf16(GemmKind which, const Tensor& left, const Tensor& other, const std::vector<GemmGroup>& groups);

}  // namespace tessera::cuda
