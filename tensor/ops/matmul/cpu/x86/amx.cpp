// bfloat16 matmul with AMX: packs b, then computes blocks of 32 x 32 over groups of columns that stay in L2.
#include "tensor/cpu/x86/amx.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "tensor/ops/matmul/cpu/gemm.h"

namespace tessera::cpu {
namespace {

// Bytes of a group of columns of b: slightly more than half of a core's L2.
constexpr int64_t kGroupBytes = 5 << 18;
constexpr int64_t kChunk = 32;  // tiles along the inner dim, if C can accumulate in place

int64_t count_blocks(int64_t n) { return (n + kTileBlock - 1) / kTileBlock; }
bfloat16* aligned(const Tensor& t) {
  return reinterpret_cast<bfloat16*>((reinterpret_cast<uintptr_t>(t.raw()) + 63) / 64 * 64);
}
Tensor workspace(const Tensor& owner, int64_t elements) {  // plus alignment
  return owner.make({elements / 2 + 16}, DType::int32, Category::workspace);
}
Bf16View make_view(const Tensor& t) {
  const auto unit = [&](int dim) { return t.dim(dim) == 1 ? int64_t{1} : t.strides()[dim]; };
  // A dim of size 1 may have any stride, so the other dim determines the layout.
  if (t.strides()[1] == 1 || t.dim(1) == 1) return {t.data<bfloat16>(), t.strides()[0], 1};
  return {t.data<bfloat16>(), unit(0), t.strides()[1]};
}

// Two adjacent tiles per 32 x 32 block.
void pack_b(bfloat16* to, const Tensor& b) {
  const int64_t k = b.dim(0), n = b.dim(1), deep = count_blocks(k);
  const Bf16View view = make_view(b);
  // Adjacent blocks of the contiguous dim share pages and prefetches, so the inner loop runs along it.
  const bool along_columns = view.col == 1;
  const int64_t outer = along_columns ? deep : count_blocks(n), inner = along_columns ? count_blocks(n) : deep;
  split(outer, 1, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t j = 0; j < inner; ++j) {
        const int64_t depth = (along_columns ? i : j) * kTileBlock, column = (along_columns ? j : i) * kTileBlock;
        pack_b_block(to + (column / kTileBlock * deep + depth / kTileBlock) * 2 * kTileElements, view.at(depth, column),
                     k - depth, n - column);
      }
  });
}

template <class T>
struct Store {
  T* out;
  int64_t stride, m, n;
  const float* bias;  // padded; or null

  struct Block {
    const float* c;
    int64_t i, j;  // row and column of the block's first element
    bool add;      // add to `out`; float32 only
  };

  [[gnu::target("avx512f,avx512bw,avx512vl,avx512bf16"), gnu::always_inline]] inline void rows(Block b, int64_t from,
                                                                                               int64_t to) const {
    const auto mask = static_cast<uint32_t>((uint64_t{1} << std::min<int64_t>(n - b.j, 32)) - 1);
    const __m512 zero = _mm512_setzero_ps();
    const __m512 b0 = bias ? _mm512_loadu_ps(bias + b.j) : zero, b1 = bias ? _mm512_loadu_ps(bias + b.j + 16) : zero;
    for (int64_t r = from; r < std::min(to, m - b.i); ++r) {
      __m512 left = _mm512_add_ps(_mm512_load_ps(b.c + r * 32), b0);
      __m512 right = _mm512_add_ps(_mm512_load_ps(b.c + r * 32 + 16), b1);
      T* const at = out + (b.i + r) * stride + b.j;
      if constexpr (std::is_same_v<T, float>) {
        const auto low = static_cast<__mmask16>(mask & 0xffff), high = static_cast<__mmask16>(mask >> 16);
        if (b.add) {
          left = _mm512_add_ps(left, _mm512_maskz_loadu_ps(low, at));
          right = _mm512_add_ps(right, _mm512_maskz_loadu_ps(high, at + 16));
        }
        _mm512_mask_storeu_ps(at, low, left);
        _mm512_mask_storeu_ps(at + 16, high, right);
      } else {
        _mm512_mask_storeu_epi16(at, mask, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(right, left)));
      }
    }
  }
  void prefetch(Block b, int64_t from, int64_t to) const {
    for (int64_t r = from; r < to; ++r)
      for (int64_t c = 0; c < kTileBlock; c += 64 / static_cast<int64_t>(sizeof(T)))
        __builtin_prefetch(out + (b.i + r) * stride + b.j + c, 1, 3);
  }
};

// float32, zero-padded to full blocks.
std::vector<float> padded_floats(const Tensor& bias) {
  std::vector<float> wide(static_cast<size_t>(count_blocks(bias.numel()) * kTileBlock));
  const int64_t n = bias.numel();
  if (bias.dtype() == DType::float32)
    std::copy(bias.data<float>(), bias.data<float>() + n, wide.begin());
  else
    std::copy(bias.data<bfloat16>(), bias.data<bfloat16>() + n, wide.begin());
  return wide;
}

// For rows that are non-contiguous or do not fill tiles.
void pack_a(bfloat16* to, Bf16View a, int64_t m, int64_t k) {
  const int64_t deep = count_blocks(k), tall = count_blocks(m);
  // Read memory along the contiguous dim.
  const bool down = a.col != 1;
  split(down ? deep : tall, 1, [=](int64_t begin, int64_t end) {
    for (int64_t outer = begin; outer < end; ++outer)
      for (int64_t inner = 0; inner < (down ? tall : deep); ++inner) {
        const int64_t i = down ? inner : outer, d = down ? outer : inner;
        pack_a_block(to + (i * deep + d) * 2 * kTileElements, a.at(i * kTileBlock, d * kTileDepth), m - i * kTileBlock,
                     k - d * kTileDepth);
      }
  });
}

struct Problem {
  int64_t m, n, deep;  // tiles along the inner dim
  int64_t chunk;       // tiles per pass
  TileOperandA a;      // the first block of rows
  int64_t a_block;
  const bfloat16* b;  // packed
};

// Overlapped with the multiplication of tile t of `deep`: storing rows of the previous block, and prefetching memory
// for this one.
template <class T>
struct Overlapped {
  const Store<T>& store;
  typename Store<T>::Block before, now;
  int64_t deep;
  [[gnu::target("avx512f,avx512bw,avx512vl,avx512bf16"), gnu::always_inline]] inline void operator()(int64_t t) const {
    const int64_t from = t * kTileBlock / deep, to = (t + 1) * kTileBlock / deep;
    if (before.c) store.rows(before, from, to);
    store.prefetch(now, from, to);
  }
};

// One thread's blocks of rows [begin, end). A group of columns of b stays in L2 while all rows stream past; a block of
// rows stays in L1 until it has been multiplied by all columns of the group. Each block is rounded and stored during
// the next block's multiplication.
template <class T>
struct Worker {
  const Problem& p;
  const Store<T>& store;
  int64_t begin, end;
  typename Store<T>::Block before{};
  int turn = 0;
  alignas(64) float c[2][kTileBlock * kTileBlock];

  Worker(const Problem& problem, const Store<T>& to, int64_t first, int64_t last)
      : p(problem), store(to), begin(first), end(last) {}

  void run() {
    const TileScope tiles;
    const int64_t panels = count_blocks(p.n);
    for (int64_t from = 0; from < p.deep; from += p.chunk) {
      const int64_t deep = std::min(p.chunk, p.deep - from);
      const int64_t group = std::clamp<int64_t>(kGroupBytes / (4 * kTileElements * deep), 1, panels);
      for (int64_t first = 0; first < panels; first += group)
        for (int64_t i = begin; i < end; ++i)
          for (int64_t j = first; j < std::min(panels, first + group); ++j) block(i, j, from, deep);
    }
    if (before.c) finish();
  }

  [[gnu::target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16")]] void block(int64_t i, int64_t j,
                                                                                       int64_t from, int64_t deep) {
    const TileOperandA a{p.a.data + i * p.a_block + from * p.a.step, p.a.lda, p.a.step, p.a.down};
    const typename Store<T>::Block now{c[turn], i * kTileBlock, j * kTileBlock, from > 0};
    tile_block(a, p.b + (j * p.deep + from) * 2 * kTileElements, deep, c[turn], kTileBlock, false,
               Overlapped<T>{store, before, now, deep});
    before = now;
    turn ^= 1;
  }
  [[gnu::target("avx512f,avx512bw,avx512vl,avx512bf16")]] void finish() { store.rows(before, 0, kTileBlock); }
};

template <class T>
void multiply(const Problem& p, const Tensor& out, const std::vector<float>& bias) {
  const Store<T> store{out.data<T>(), std::max(out.strides()[0], out.dim(1)), p.m, p.n,
                       bias.empty() ? nullptr : bias.data()};
  split(count_blocks(p.m), 1, [&](int64_t begin, int64_t end) {
    Worker<T> worker(p, store, begin, end);
    worker.run();
  });
}

}  // namespace

bool amx_supports(const Tensor& a, const Tensor& b) {
  return a.dtype() == DType::bfloat16 && a.dim(0) >= kTileBlock && b.dim(1) >= kTileRows && a.dim(1) >= kTileRows &&
         has_amx();
}

void amx_matmul(Tensor& out, const Tensor& a, const Tensor& b, const Tensor& bias, Packed* packed) {
  const int64_t m = a.dim(0), n = b.dim(1), k = a.dim(1);
  Packed once;
  Packed& cached = packed ? *packed : once;
  if (cached.source != b.raw() || cached.version != b.storage()->version || !packed) {
    const int64_t elements = count_blocks(n) * count_blocks(k) * 2 * kTileElements;
    if (!cached.bytes.defined() || cached.bytes.nbytes() < 2 * elements + 64) cached.bytes = workspace(b, elements);
    pack_b(aligned(cached.bytes), b);
    cached.version = b.storage()->version;
    cached.source = b.raw();
  }
  const std::vector<float> wide = bias.defined() ? padded_floats(bias) : std::vector<float>();
  const Bf16View view = make_view(a);
  const bool add = out.dtype() == DType::float32 && !bias.defined();
  Problem p{m,
            n,
            count_blocks(k),
            add ? kChunk : count_blocks(k),
            {view.data, view.row, kTileDepth, kTileRows * view.row},
            kTileBlock * view.row,
            aligned(cached.bytes)};
  Tensor tiles;
  if (view.col != 1 || k % kTileDepth != 0 || m % kTileBlock != 0) {
    const int64_t block = p.deep * 2 * kTileElements;
    tiles = workspace(a, count_blocks(m) * block);
    pack_a(aligned(tiles), view, m, k);
    p.a = {aligned(tiles), kTileDepth, 2 * kTileElements, kTileElements};
    p.a_block = block;
  }
  out.dtype() == DType::float32 ? multiply<float>(p, out, wide) : multiply<bfloat16>(p, out, wide);
}

}  // namespace tessera::cpu
