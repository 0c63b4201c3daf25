// GPU dequantization: a thread decodes the four bytes of eight adjacent elements.
#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tensor/cuda/copy.h"
#include "tensor/cuda/loops.cuh"
#include "tensor/dtype.h"
#include "tensor/ops/quantize/quantize.h"

namespace tessera::cuda {

namespace {

constexpr int kEach = 8;  // elements per thread

// Start of an element run in the shard and in the full matrix.
struct RunStart {
  int64_t here, full;
};

struct Decode {
  const uint8_t *codes, *scales;
  int64_t count, together;  // local elements; gptq: elements per scale
  // nf4 only:
  const float* shared;
  const RunStart* starts;  // null for a single run
  int64_t runs, first_full, groups;
  int matrices;
  int64_t first_blocks[kMaxFused] = {}, first_groups[kMaxFused] = {};
  float levels[16] = {}, fractions[256] = {};

  __device__ int64_t full_index(int64_t here) const {
    if (!starts) return here + first_full;
    int64_t low = 0, high = runs - 1;  // the last run that starts at or before `here`
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (starts[middle].here <= here)
        low = middle;
      else
        high = middle - 1;
    }
    return starts[low].full + here - starts[low].here;
  }
  // In float64, as on the CPU: a product of two floats is exact, so a fused multiply-add does not change the rounding.
  __device__ float nf4_scale(int64_t here) const {
    const int64_t block = full_index(here) / kNf4Block;
    int matrix = matrices - 1;
    while (matrix > 0 && first_blocks[matrix] > block) --matrix;
    const int64_t group = first_groups[matrix] + (block - first_blocks[matrix]) / kScalesOfGroup;
    const double fraction = fractions[scales[here / kNf4Block]], largest = shared[group],
                 mean = shared[groups + matrix];
    return static_cast<float>(fraction * largest + mean);
  }
};

// Two gptq groups have one scale each and a byte with both zeros.
struct GroupScale {
  float scale;
  int zero;
};
__device__ GroupScale group_scale(const uint8_t* scales, int64_t group) {
  const uint8_t* const at = scales + group / 2 * 5;
  const int half = static_cast<int>(group % 2);
  return {wide(Half{static_cast<uint16_t>(at[2 * half] | at[2 * half + 1] << 8)}), at[4] >> (4 * half) & 15};
}

static_assert(kNf4Block % kEach == 0);

// kOneScale: a thread's elements share their scale, so one division suffices. Always true for nf4.
template <class T, bool kNf4, bool kOneScale>
__global__ void decode_kernel(const Decode f, T* out) {
  __shared__ float levels[16];
  if constexpr (kNf4) {
    if (threadIdx.x < 16) levels[threadIdx.x] = f.levels[threadIdx.x];
    __syncthreads();
  }
  const int64_t first = global_thread() * kEach;
  if (first >= f.count) return;
  const bool full_vector = first + kEach <= f.count;
  const int n = full_vector ? kEach : static_cast<int>(f.count - first);
  uint32_t codes = 0;
  if (full_vector)
    codes = *reinterpret_cast<const uint32_t*>(f.codes + first / 2);
  else
    for (int k = 0; k < n; k += 2) codes |= static_cast<uint32_t>(f.codes[(first + k) / 2]) << (4 * k);
  Packed<T, kEach> v;
  GroupScale g{};
  for (int k = 0; k < kEach; ++k) {
    const int64_t at = first + k;
    const int code = static_cast<int>(codes >> (4 * k) & 15);
    if constexpr (kNf4) {
      if (k == 0) g.scale = f.nf4_scale(at);
      v.v[k] = T(levels[code] * g.scale);
    } else {
      if (k == 0 || (!kOneScale && at % f.together == 0 && k < n)) g = group_scale(f.scales, at / f.together);
      v.v[k] = T(g.scale * static_cast<float>(code - g.zero));
    }
  }
  if (full_vector) {
    store(out + first, v);
  } else {
    for (int k = 0; k < kEach; ++k)
      if (k < n) out[first + k] = v.v[k];
  }
}

}  // namespace

void dequantize(const Packing& p, std::span<const ElementRun> runs, const Tensor& bytes, const Tensor& out) {
  const FusedBounds bounds(p);
  const int64_t n = out.numel();
  const bool nf4 = p.codec == Codec::nf4;
  if (std::ssize(p.fused_rows) > kMaxFused)
    throw Error("[dequantize] a fusion of " + std::to_string(p.fused_rows.size()) + " matrices; expected at most " +
                std::to_string(kMaxFused));
  const Sections at(p, n);
  const uint8_t* const from = bytes.device_data<uint8_t>();
  Decode f{.codes = from + at.codes,
           .scales = from + at.scales,
           .count = n,
           .together = p.group,
           .shared = reinterpret_cast<const float*>(from),
           .starts = nullptr,
           .runs = std::ssize(runs),
           .first_full = runs.empty() ? 0 : runs[0].full,
           .groups = bounds.groups,
           .matrices = static_cast<int>(p.fused_rows.size())};
  Tensor table;
  if (nf4) {
    std::ranges::copy(bounds.first_blocks, f.first_blocks);
    std::ranges::copy(bounds.first_groups, f.first_groups);
    std::ranges::copy(nf4_values(), f.levels);
    std::ranges::copy(dynamic_values(), f.fractions);
    if (runs.size() > 1) {
      std::vector<RunStart> starts;
      for (const ElementRun& run : runs) starts.push_back({run.here, run.full});
      table = bytes.make({2 * f.runs}, DType::int64, Category::workspace);
      copy_cached_constant(table, std::as_bytes(std::span(starts)));
      f.starts = reinterpret_cast<const RunStart*>(table.device_data<int64_t>());
    }
  }
  with_floating(out.dtype(), "dequantize", [&](auto t) {
    using T = decltype(t);
    launch(context(out), "dequantize", {.blocks = blocks_for(n, int64_t{kThreads} * kEach)},
           nf4                    ? decode_kernel<T, true, true>
           : p.group % kEach == 0 ? decode_kernel<T, false, true>
                                  : decode_kernel<T, false, false>,
           f, out.device_data<T>());
  });
}

}  // namespace tessera::cuda
