// Products of groups of rows on a GPU: what kernels of all types share. A line is a row of the left factor or a column
// of the right one; each element of a product is a sum over the inner dim of two lines. A launch makes the tiles of all
// groups, one after another: a block looks for its own among them.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "tensor/cuda/launch.cuh"
#include "tensor/cuda/loops.cuh"
#include "tensor/cuda/shared.cuh"
#include "tensor/cuda/shared_tile.cuh"
#include "tensor/math.h"
#include "tensor/ops/experts/experts.h"

namespace tessera::cuda {

inline constexpr int kMostGroups = 192;  // of a launch

// `left` and `other` are whole, `own` is a matrix of each group: `left` is the left factor, and of weights' gradients
// `other` is the right one and `own` the product, else the other way round.
template <class T, class Out, bool kOfWeights>
struct RowsCall {
  const T* left;
  std::conditional_t<kOfWeights, const T*, Out*> other;
  int left_width, other_width;
  int groups = 0;
  int row[kMostGroups + 1] = {}, tile[kMostGroups + 1] = {};  // where they begin, and the last one ends
  std::conditional_t<kOfWeights, Out*, const T*> own[kMostGroups] = {};
  bool adds[kMostGroups] = {};
};
static_assert(sizeof(RowsCall<float, float, true>) <= 4096, "what a launch takes on every GPU");

// A group's product.
template <class T, class Out>
struct RowsFactors {
  const T *left, *right;
  Out* out;
  int rows, columns, inner;
  bool adds;
};
template <class T, class Out, bool kOfWeights>
__device__ RowsFactors<T, Out> factors_of(const RowsCall<T, Out, kOfWeights>& call, int group) {
  const int first = call.row[group], rows = call.row[group + 1] - first;
  const auto left = call.left + static_cast<int64_t>(first) * call.left_width;
  const auto other = call.other + static_cast<int64_t>(first) * call.other_width;
  if constexpr (kOfWeights)
    return {left, other, call.own[group], call.left_width, call.other_width, rows, call.adds[group]};
  else
    return {left, call.own[group], other, rows, call.other_width, call.left_width, false};
}

// Where a block's tile begins. Neighbouring blocks have the same lines of the right factor.
struct RowsTile {
  int group, row, column;
};
template <int kTile, class T, class Out, bool kOfWeights>
__device__ RowsTile tile_of(const RowsCall<T, Out, kOfWeights>& call, int block) {
  int group = 0;
  for (int end = call.groups; end - group > 1;) {
    const int middle = (group + end) / 2;
    (call.tile[middle] <= block ? group : end) = middle;
  }
  const int rows = kOfWeights ? call.left_width : call.row[group + 1] - call.row[group];
  const int down = (rows + kTile - 1) / kTile, at = block - call.tile[group];
  return {group, at % down * kTile, at / down * kTile};
}

inline int64_t tiles_in(RowsProduct which, const RowsGroup& group, const Tensor& left, const Tensor& other,
                        int64_t tile) {
  const bool of_weights = which == RowsProduct::weight_grad;
  if (of_weights && !group.w.defined()) return 0;
  return blocks_for(of_weights ? left.dim(1) : group.rows, tile) * blocks_for(other.dim(1), tile);
}

// Whether to take tiles of half the side: larger ones would leave multiprocessors without a block, or more than a
// quarter of them would lie outside the products. An element's bits are the same in both.
inline bool small_tiles(RowsProduct which, const Tensor& left, const Tensor& other,
                        const std::vector<RowsGroup>& groups, int64_t large) {
  constexpr int64_t kFewBlocks = 128;
  int64_t of_large = 0, of_small = 0;
  for (const RowsGroup& group : groups) {
    of_large += tiles_in(which, group, left, other, large);
    of_small += tiles_in(which, group, left, other, large / 2);
  }
  return of_large < kFewBlocks || of_small < 3 * of_large;
}

// Calls f(call, blocks) for each launch.
template <class T, class Out, bool kOfWeights, class F>
void for_each_launch(RowsProduct which, const Tensor& left, const Tensor& other, const std::vector<RowsGroup>& groups,
                     int64_t tile, const F& f) {
  RowsCall<T, Out, kOfWeights> call{.left = left.device_data<T>(),
                                    .other = other.device_data<std::conditional_t<kOfWeights, T, Out>>(),
                                    .left_width = static_cast<int>(left.dim(1)),
                                    .other_width = static_cast<int>(other.dim(1))};
  int64_t row = 0;
  for (size_t begin = 0; begin < groups.size(); begin += kMostGroups) {
    call.groups = static_cast<int>(std::min<size_t>(kMostGroups, groups.size() - begin));
    int64_t tiles = 0;
    for (int g = 0; g < call.groups; ++g) {
      const RowsGroup& group = groups[begin + static_cast<size_t>(g)];
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

// Calls f(whether a line of the left factor lies side by side, whether one of the right factor does).
template <class F>
void with_lines(RowsProduct which, const F& f) {
  if (which == RowsProduct::forward)
    f(std::true_type{}, std::true_type{});
  else if (which == RowsProduct::input_grad)
    f(std::true_type{}, std::false_type{});
  else
    f(std::false_type{}, std::false_type{});
}

// The products on tensor cores, defined below.
void multiply_rows_bf16(RowsProduct which, const Tensor& left, const Tensor& other,
                        const std::vector<RowsGroup>& groups);

// Products for any number of rows in float32 and float64, with the bits of the CPU: an element is one chain of fused
// multiply-adds in the order of the inner dim, in one thread's register.
//
// A block makes a tile of 16 kPer rows and columns, a thread kPer x kPer elements of it. Slabs of the factors, 16 of
// the inner dim deep, go through shared memory; the next one is on its way to registers while one is multiplied.

namespace {

constexpr int kDepth = 16, kSide = 16, kBlockThreads = kSide * kSide;

// [inner][line]; rows of a length that spreads a line over the banks.
template <class T, int kPer>
struct alignas(32) Slab {
  static constexpr int kLines = kSide * kPer;
  T at[kDepth][kLines + 4];
};

// A thread's part of a slab on its way.
template <class T, int kPer, bool kAlong>
struct Fetched {
  static constexpr int kLines = Slab<T, kPer>::kLines;
  T values[kPer];

  // Threads beside each other read what lies side by side.
  static __device__ int line(int t, int i) { return kAlong ? t / kDepth + i * (kBlockThreads / kDepth) : t % kLines; }
  static __device__ int depth(int t, int i) { return kAlong ? t % kDepth : t / kLines + i * (kBlockThreads / kLines); }
  __device__ void fetch(const T* from, int line0, int lines, int inner0, int inner) {
    int t = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(t));  // addresses are made anew at each step: kept over all of them they spill the sums
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int l = line0 + line(t, i), k = inner0 + depth(t, i);
      const int64_t at = kAlong ? static_cast<int64_t>(l) * inner + k : static_cast<int64_t>(k) * lines + l;
      values[i] = l < lines && k < inner ? from[at] : T(0);
    }
  }
  __device__ void put(Slab<T, kPer>& slab) const {
    const int t = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kPer; ++i) slab.at[depth(t, i)][line(t, i)] = values[i];
  }
};

// The lines of a thread: four neighbours of each 64.
__device__ inline int line_of(int side, int i) { return i / 4 * (4 * kSide) + side * 4 + i % 4; }

template <class T, int kPer>
__device__ void read_lines(const Slab<T, kPer>& slab, int k, int side, T (&to)[kPer]) {
#pragma unroll
  for (int i = 0; i < kPer; i += 4) {
    const Packed<T, 4> four = load<4>(&slab.at[k][line_of(side, i)]);
#pragma unroll
    for (int e = 0; e < 4; ++e) to[i + e] = four.v[e];
  }
}

template <class T, bool kLeftAlong>
using Call = RowsCall<T, T, !kLeftAlong>;

template <class T, int kPer, bool kLeftAlong, bool kRightAlong>
__global__ __launch_bounds__(kBlockThreads, 2) void rows_kernel(const __grid_constant__ Call<T, kLeftAlong> call) {
  __shared__ Slab<T, kPer> left, right;
  const RowsTile at = tile_of<kSide * kPer>(call, static_cast<int>(blockIdx.x));
  const auto of = factors_of(call, at.group);
  const int down = static_cast<int>(threadIdx.x) / kSide, across = static_cast<int>(threadIdx.x) % kSide;
  Fetched<T, kPer, kLeftAlong> of_left;
  Fetched<T, kPer, kRightAlong> of_right;
  const auto fetch = [&](int k) {
    of_left.fetch(of.left, at.row, of.rows, k, of.inner);
    of_right.fetch(of.right, at.column, of.columns, k, of.inner);
  };
  T sums[kPer][kPer] = {};
  fetch(0);
  for (int k0 = 0; k0 < of.inner; k0 += kDepth) {
    __syncthreads();  // the slabs before these have been read
    of_left.put(left);
    of_right.put(right);
    __syncthreads();
    if (k0 + kDepth < of.inner) fetch(k0 + kDepth);
    const int depth = of.inner - k0 < kDepth ? of.inner - k0 : kDepth;
#pragma unroll 2
    for (int k = 0; k < depth; ++k) {
      T a[kPer], b[kPer];
      read_lines<T, kPer>(left, k, down, a);
      read_lines<T, kPer>(right, k, across, b);
#pragma unroll
      for (int i = 0; i < kPer; ++i)
#pragma unroll
        for (int j = 0; j < kPer; ++j) sums[i][j] = math::fma(a[i], b[j], sums[i][j]);
    }
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i)
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int row = at.row + line_of(down, i), column = at.column + line_of(across, j);
      if (row >= of.rows || column >= of.columns) continue;
      T& to = of.out[static_cast<int64_t>(row) * of.columns + column];
      to = of.adds ? to + sums[i][j] : sums[i][j];
    }
}

template <class T, int kPer>
void queue(RowsProduct which, const Tensor& left, const Tensor& other, const std::vector<RowsGroup>& groups) {
  with_lines(which, [&](auto of_left, auto of_right) {
    constexpr bool kLeft = decltype(of_left)::value, kRight = decltype(of_right)::value;
    for_each_launch<T, T, !kLeft>(which, left, other, groups, kSide * kPer, [&](const auto& call, int64_t blocks) {
      launch(context(left), "linear_rows", {.blocks = blocks, .threads = kBlockThreads},
             rows_kernel<T, kPer, kLeft, kRight>, call);
    });
  });
}

}  // namespace

void multiply_rows(RowsProduct which, const Tensor& left, const Tensor& other, const std::vector<RowsGroup>& groups) {
  if (left.dtype() == DType::bfloat16) return multiply_rows_bf16(which, left, other, groups);
  if (left.dtype() == DType::float64) {
    if constexpr (kFloat64Kernels)
      return queue<double, 4>(which, left, other, groups);
    else
      refuse_float64(left.dtype(), "linear_rows");
  }
  if (small_tiles(which, left, other, groups, kSide * 8))
    queue<float, 4>(which, left, other, groups);
  else
    queue<float, 8>(which, left, other, groups);
}

// Products for any number of rows in bfloat16 on tensor cores: an element is one chain of multiply_add() over steps of
// sixteen of the inner dim, in order, whatever tile it lies in.
//
// A block makes a tile of kTile rows and columns, a warp kTile / 2 rows and 32 columns of it. Slabs of the factors, 64
// of the inner dim deep, lie in shared memory as they do in the GPU's: a line along a row of the tile, or down a
// column, and are read as they are or transposed. Two slabs are on their way while one is multiplied.

namespace {

constexpr int kDepth = 64, kStages = 3;
constexpr int kColumns = 4;  // of a warp, by eights

template <int kTile>
constexpr int kBlockThreads = 2 * kTile;  // a warp for each half of the rows and each 32 columns
template <int kTile>
constexpr int kSlabBytes = kTile* kDepth * 2;

// A slab of lines that begin at `first`, of `lines` in all.
template <int kTile, bool kAlong, bool kWhole>
struct Slab {
  static constexpr int kWidth = kAlong ? kDepth : kTile, kHeight = kAlong ? kTile : kDepth;
  SharedTile<kWidth> tile;

  // Begins to copy it, from `inner0` of the inner dim on; what is not there is zero.
  __device__ void fetch(const bfloat16* from, int first, int lines, int inner0, int inner) const {
    constexpr int kChunks = kWidth / 8, kAtOnce = kBlockThreads<kTile> / kChunks;
    const int width = kAlong ? inner : lines, height = kAlong ? lines : inner;
    const int c = static_cast<int>(threadIdx.x) % kChunks;
    const int column = (kAlong ? inner0 : first) + c * 8, row0 = kAlong ? first : inner0;
    constexpr int kTimes = kHeight / kAtOnce;
#pragma unroll(kWhole ? kTimes : 1)
    for (int i = 0; i < kTimes; ++i) {
      const int row = static_cast<int>(threadIdx.x) / kChunks + i * kAtOnce;
      const bool valid = row0 + row < height && column < width;
      const bfloat16* const source = from + (valid ? static_cast<int64_t>(row0 + row) * width + column : 0);
      if constexpr (kWhole) {
        copy_async(tile.chunk(row, c), source, valid);
      } else {
        Packed<bfloat16, 8> part{};
        for (int e = 0; e < 8; ++e)
          if (valid && column + e < width) part.v[e] = source[e];
        unsigned char* const shared = dynamic_shared<unsigned char>();
        store(reinterpret_cast<bfloat16*>(shared + (tile.chunk(row, c) - shared_address(shared))), part);
      }
    }
  }
  // The 16 x 16 factor of lines from `line` + 16 r on, step k of the inner dim: `line` a multiple of the warp's lines.
  __device__ void read_left(uint32_t (&a)[4], int line, int r, int k) const {
    const int l = lane();
    if constexpr (kAlong)
      load_matrices(a, (tile.chunk(line + l % 16, l / 16) ^ (k * 32u)) + tile.bytes(16 * r));
    else
      load_transposed(a, (tile.chunk(l % 8 + l / 16 * 8, line / 8 + l / 8 % 2) ^ (r * 32u)) + tile.bytes(16 * k));
  }
  // The 16 x 8 factors of lines from `line` + 8 c on and of the next eight; c is even.
  __device__ void read_right(uint32_t (&b)[4], int line, int c, int k) const {
    const int l = lane();
    if constexpr (kAlong)
      load_matrices(b, (tile.chunk(line + l / 16 * 8 + l % 8, l / 8 % 2) ^ (k * 32u)) + tile.bytes(8 * c));
    else
      load_transposed(b, (tile.chunk(l % 16, line / 8 + l / 16) ^ (c * 16u)) + tile.bytes(16 * k));
  }
};

template <int kTile, bool kLeftAlong, bool kRightAlong, bool kWhole, class Out>
__global__ __launch_bounds__(kBlockThreads<kTile>, 2) void rows_bf16_kernel(
    const __grid_constant__ RowsCall<bfloat16, Out, !kLeftAlong> call) {
  constexpr int kRows = kTile / 32;  // of a warp, by sixteens
  const uint32_t base = shared_address(dynamic_shared<unsigned char>());
  const RowsTile at = tile_of<kTile>(call, static_cast<int>(blockIdx.x));
  const auto factors = [&call, &at] {
    int group = at.group;
    if constexpr (!kLeftAlong) asm volatile("" : "+r"(group));  // looked up anew at each step: kept they spill the sums
    return factors_of(call, group);
  };
  const int row = warp() % 2 * (kTile / 2), column = warp() / 2 * 32;
  const auto left = [&](int step) {
    return Slab<kTile, kLeftAlong, kWhole>{base + static_cast<uint32_t>(step % kStages) * 2 * kSlabBytes<kTile>};
  };
  const auto right = [&](int step) {
    return Slab<kTile, kRightAlong, kWhole>{left(step).tile.base + kSlabBytes<kTile>};
  };
  const int steps = (factors().inner + kDepth - 1) / kDepth;
  const auto fetch = [&](int step) {
    if (step < steps) {
      const auto of = factors();
      left(step).fetch(of.left, at.row, of.rows, step * kDepth, of.inner);
      right(step).fetch(of.right, at.column, of.columns, step * kDepth, of.inner);
    }
    commit_copies();
  };
  WarpSums<kRows, kColumns> sums = {};
  for (int step = 0; step + 1 < kStages; ++step) fetch(step);
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // the copies of all threads are there, and nobody needs the stage that is filled next
    fetch(step + kStages - 1);
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      uint32_t a[kRows][4];
#pragma unroll
      for (int r = 0; r < kRows; ++r) left(step).read_left(a[r], row, r, k);
#pragma unroll
      for (int c = 0; c < kColumns; c += 2) {
        uint32_t b[4];
        right(step).read_right(b, column, c, k);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          multiply_add(sums[r][c], a[r], b[0], b[1]);
          multiply_add(sums[r][c + 1], a[r], b[2], b[3]);
        }
      }
    }
  }
  const auto of = factors();
  for_each_sum<kRows, kColumns>([&](int r, int c, int e, int down, int across) {
    const int i = at.row + row + down, j = at.column + column + across;
    if (i >= of.rows || j >= of.columns) return;
    Out& to = of.out[static_cast<int64_t>(i) * of.columns + j];
    const Out sum = converted<Out>(sums[r][c][e]);
    to = of.adds ? converted<Out>(static_cast<float>(to) + static_cast<float>(sum)) : sum;
  });
}

template <int kTile, class Out, class Left, class Right>
void queue(RowsProduct which, const Tensor& left, const Tensor& other, const std::vector<RowsGroup>& groups, Left,
           Right) {
  // Rows that begin and end with parts of 16 bytes.
  const auto whole = [&](const Tensor& t) {
    return t.dim(1) % 8 == 0 && reinterpret_cast<uintptr_t>(t.device_data<bfloat16>()) % 16 == 0;
  };
  const auto with = [&](auto is_whole) {
    for_each_launch<bfloat16, Out, !Left::value>(
        which, left, other, groups, kTile, [&](const auto& call, int64_t blocks) {
          launch(context(left), "linear_rows",
                 {.blocks = blocks, .threads = kBlockThreads<kTile>, .shared = kStages * 2 * kSlabBytes<kTile>},
                 rows_bf16_kernel<kTile, Left::value, Right::value, decltype(is_whole)::value, Out>, call);
        });
  };
  const auto own = [&](const RowsGroup& g) { return whole(g.w); };
  if (whole(left) && (Left::value ? std::ranges::all_of(groups, own) : whole(other)))
    with(std::true_type{});
  else
    with(std::false_type{});
}

template <class Out, class Left, class Right>
void queue(RowsProduct which, const Tensor& left, const Tensor& other, const std::vector<RowsGroup>& groups,
           Left of_left, Right of_right) {
  if (small_tiles(which, left, other, groups, 128))
    queue<64, Out>(which, left, other, groups, of_left, of_right);
  else
    queue<128, Out>(which, left, other, groups, of_left, of_right);
}

}  // namespace

void multiply_rows_bf16(RowsProduct which, const Tensor& left, const Tensor& other,
                        const std::vector<RowsGroup>& groups) {
  with_lines(which, [&](auto of_left, auto of_right) {
    if constexpr (!decltype(of_left)::value)
      if (std::ranges::any_of(groups,
                              [](const RowsGroup& g) { return g.w.defined() && g.w.dtype() == DType::float32; }))
        return queue<float>(which, left, other, groups, of_left, of_right);
    queue<bfloat16>(which, left, other, groups, of_left, of_right);
  });
}

}  // namespace tessera::cuda
