// Grouped GEMM for bfloat16 on tensor cores: each element is one chain of multiply_add() over steps of sixteen inner
// elements, in order, in any tile.
//
// A block computes a tile of kTile rows and columns, a warp a quarter of it. Slabs of the operands with inner depth 64
// have global memory's layout in shared memory and are loaded directly or transposed. Two slabs are prefetched while
// one is multiplied.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "tensor/cuda/loops.cuh"
#include "tensor/cuda/mma.cuh"
#include "tensor/cuda/shared_tile.cuh"
#include "tensor/ops/experts/cuda/rows.cuh"

namespace tessera::cuda {
namespace {

constexpr int kDepth = 64, kStages = 3;
constexpr int kBlockThreads = 128;  // one warp per quarter of a tile
template <int kTile>
constexpr int kSlabBytes = kTile* kDepth * 2;

// Slab of lines starting at `first`, of `lines` in total.
template <int kTile, bool kAlong, bool kVectorized>
struct Slab {
  static constexpr int kWidth = kAlong ? kDepth : kTile, kHeight = kAlong ? kTile : kDepth;
  SharedTile<kWidth> tile;

  // Starts the copy from inner index `inner0` on, zero-padded.
  __device__ void fetch(const bfloat16* from, int first, int lines, int inner0, int inner) const {
    constexpr int kChunks = kWidth / 8, kAtOnce = kBlockThreads / kChunks;
    const int width = kAlong ? inner : lines, height = kAlong ? lines : inner;
    const int c = static_cast<int>(threadIdx.x) % kChunks;
    const int column = (kAlong ? inner0 : first) + c * 8, row0 = kAlong ? first : inner0;
    constexpr int kTimes = kHeight / kAtOnce;
#pragma unroll(kVectorized ? kTimes : 1)
    for (int i = 0; i < kTimes; ++i) {
      const int row = static_cast<int>(threadIdx.x) / kChunks + i * kAtOnce;
      const bool valid = row0 + row < height && column < width;
      const bfloat16* const source = from + (valid ? static_cast<int64_t>(row0 + row) * width + column : 0);
      if constexpr (kVectorized) {
        copy_async(tile.chunk(row, c), source, valid);
      } else {
        Packed<bfloat16, 8> packed{};
        for (int e = 0; e < 8; ++e)
          if (valid && column + e < width) packed.v[e] = source[e];
        unsigned char* const shared = dynamic_shared<unsigned char>();
        store(reinterpret_cast<bfloat16*>(shared + (tile.chunk(row, c) - shared_address(shared))), packed);
      }
    }
  }
  // The 16 x 16 operand of lines from `line` + 16 r on, at inner step k; `line` is a multiple of the warp's lines.
  __device__ void read_left(uint32_t (&a)[4], int line, int r, int k) const {
    const int l = lane();
    if constexpr (kAlong)
      load_matrices(a, (tile.chunk(line + l % 16, l / 16) ^ (k * 32u)) + tile.bytes(16 * r));
    else
      load_transposed(a, (tile.chunk(l % 8 + l / 16 * 8, line / 8 + l / 8 % 2) ^ (r * 32u)) + tile.bytes(16 * k));
  }
  // The 16 x 8 operands of lines from `line` + 8 c on and of the next eight lines; c is even.
  __device__ void read_right(uint32_t (&b)[4], int line, int c, int k) const {
    const int l = lane();
    if constexpr (kAlong)
      load_matrices(b, (tile.chunk(line + l / 16 * 8 + l % 8, l / 8 % 2) ^ (k * 32u)) + tile.bytes(8 * c));
    else
      load_transposed(b, (tile.chunk(l % 16, line / 8 + l / 16) ^ (c * 16u)) + tile.bytes(16 * k));
  }
};

template <int kTile, bool kLeftAlong, bool kRightAlong, bool kVectorized, class Out>
__global__ __launch_bounds__(kBlockThreads, 2) void rows_bf16_kernel(
    const __grid_constant__ GroupedCall<bfloat16, Out, !kLeftAlong> call) {
  constexpr int kRows = kTile / 32, kColumns = kTile / 16;  // per warp, in units of 16 and 8
  const uint32_t base = shared_address(dynamic_shared<unsigned char>());
  const GroupTile at = find_tile<kTile>(call, static_cast<int>(blockIdx.x));
  const auto factors = [&call, &at] {
    int group = at.group;
    if constexpr (!kLeftAlong) asm volatile("" : "+r"(group));  // reload: a live value would spill the accumulators
    return load_factors(call, group);
  };
  const int row = warp() % 2 * (kTile / 2), column = warp() / 2 * (kTile / 2);
  const auto left = [&](int step) {
    return Slab<kTile, kLeftAlong, kVectorized>{base + static_cast<uint32_t>(step % kStages) * 2 * kSlabBytes<kTile>};
  };
  const auto right = [&](int step) {
    return Slab<kTile, kRightAlong, kVectorized>{left(step).tile.base + kSlabBytes<kTile>};
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
    __syncthreads();  // all copies have arrived; the stage to be filled next is free
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
  const auto put = [&](auto at_once) {  // adjacent elements
    constexpr int kAtOnce = decltype(at_once)::value;
    for_each_sum<kRows, kColumns>([&](int r, int c, int e, int down, int across) {
      const int i = at.row + row + down, j = at.column + column + across;
      if (e % kAtOnce != 0 || i >= of.rows || j >= of.columns) return;
      Out* const to = of.out + static_cast<int64_t>(i) * of.columns + j;
      Packed<Out, kAtOnce> sum;
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) sum.v[n] = converted<Out>(sums[r][c][e + n]);
      if (of.adds) {
        const Packed<Out, kAtOnce> there = load<kAtOnce>(to);
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n)
          sum.v[n] = converted<Out>(static_cast<float>(there.v[n]) + static_cast<float>(sum.v[n]));
      }
      store(to, sum);
    });
  };
  if (of.columns % 2 == 0 && reinterpret_cast<uintptr_t>(of.out) % (2 * sizeof(Out)) == 0)
    put(std::integral_constant<int, 2>{});
  else
    put(std::integral_constant<int, 1>{});
}

template <int kTile, class Out, class Left, class Right>
void queue(GemmKind which, const Tensor& left, const Tensor& other, const std::vector<GemmGroup>& groups, Left, Right) {
  const auto is_vectorized = [&](const Tensor& t) {
    return t.dim(1) % 8 == 0 && reinterpret_cast<uintptr_t>(t.device_data<bfloat16>()) % 16 == 0;
  };
  const auto with = [&](auto vectorized) {
    for_each_launch<bfloat16, Out, !Left::value>(
        which, left, other, groups, kTile, [&](const auto& call, int64_t blocks) {
          launch(context(left), "grouped_linear",
                 {.blocks = blocks, .threads = kBlockThreads, .shared = kStages * 2 * kSlabBytes<kTile>},
                 rows_bf16_kernel<kTile, Left::value, Right::value, decltype(vectorized)::value, Out>, call);
        });
  };
  const auto own = [&](const GemmGroup& g) { return is_vectorized(g.w); };
  if (is_vectorized(left) && (Left::value ? std::ranges::all_of(groups, own) : is_vectorized(other)))
    with(std::true_type{});
  else
    with(std::false_type{});
}

template <class Out, class Left, class Right>
void queue(GemmKind which, const Tensor& left, const Tensor& other, const std::vector<GemmGroup>& groups, Left of_left,
           Right of_right) {
  if (small_tiles(which, left, other, groups, 128))
    queue<64, Out>(which, left, other, groups, of_left, of_right);
  else
    queue<128, Out>(which, left, other, groups, of_left, of_right);
}

}  // namespace

void grouped_gemm_bf16(GemmKind which, const Tensor& left, const Tensor& other, const std::vector<GemmGroup>& groups) {
  with_lines(which, [&](auto of_left, auto of_right) {
    if constexpr (!decltype(of_left)::value)
      if (std::ranges::any_of(groups,
                              [](const GemmGroup& g) { return g.w.defined() && g.w.dtype() == DType::float32; }))
        return queue<float>(which, left, other, groups, of_left, of_right);
    queue<bfloat16>(which, left, other, groups, of_left, of_right);
  });
}

}  // namespace tessera::cuda
