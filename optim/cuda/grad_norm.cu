// GPU gradient norm: sixteen threads per norm block, one per lane; one thread per group of block sums; one thread sums
// the groups.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "optim/grad_norm.h"
#include "tensor/cuda/launch.cuh"
#include "tensor/math.h"

namespace tessera::cuda {
namespace {

constexpr int kLanes = 16;
constexpr int kBlocksPerThreads = kThreads / kLanes;  // norm blocks per thread block
constexpr int kGroups = 1024;                         // summed by one thread block
constexpr int kMaxRuns = 64;

template <class G>
__global__ void block_sums_kernel(const G* x, int64_t n, double* sums) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kBlocksPerThreads + threadIdx.x / kLanes;
  const int64_t begin = block * kNormBlock, end = std::min(n, begin + kNormBlock);
  double lane = 0;
  for (int64_t i = begin + threadIdx.x % kLanes; i < end; i += kLanes) {
    const auto g = static_cast<double>(x[i]);
    lane = math::fma(g, g, lane);
  }
  // Lanes beyond the first `half` of a block compute unused sums.
  for (unsigned half = kLanes / 2; half > 0; half /= 2) lane += __shfl_down_sync(~0u, lane, half);
  if (threadIdx.x % kLanes == 0 && begin < n) sums[block] = lane;
}

struct Runs {
  BlockRun of[kMaxRuns];
};

// The group may span several segments of a run. Reads global memory directly, because a few hundred threads keep more
// loads in flight than a staged copy to shared memory would.
__device__ double group_sum(const BlockRun& run, const double* x, int64_t group) {
  int64_t at = group * kNormGroup, left = std::min(int64_t{kNormGroup}, run.count * run.times - at);
  double sum = 0;
  while (left > 0) {
    const int64_t segment = at / run.count, from = at - segment * run.count, here = std::min(left, run.count - from);
    const double* const values = x + run.begin + segment * run.stride + from;
#pragma unroll 8
    for (int64_t i = 0; i < here; ++i) sum += values[i];
    at += here;
    left -= here;
  }
  return sum;
}

__global__ __launch_bounds__(kGroups) void ordered_sums_kernel(Runs runs, const double* x, double* out) {
  __shared__ double sums[kGroups];
  const BlockRun& run = runs.of[blockIdx.x];
  const int64_t groups = (run.count * run.times + kNormGroup - 1) / kNormGroup;
  double total = 0;
  for (int64_t first = 0; first < groups; first += kGroups) {
    const int64_t group = first + threadIdx.x;
    if (group < groups) sums[threadIdx.x] = group_sum(run, x, group);
    __syncthreads();
    if (threadIdx.x == 0)
      for (int64_t g = 0; g < std::min<int64_t>(kGroups, groups - first); ++g) total += sums[g];
    __syncthreads();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = total;
}

}  // namespace

void block_sums(const Tensor& grads, const Tensor& sums) {
  with_floating(grads.dtype(), "grad_norm", [&](auto type) {
    using G = decltype(type);
    launch(context(grads), "block_sums", {.blocks = blocks_for(norm_blocks(grads.numel()), kBlocksPerThreads)},
           block_sums_kernel<G>, grads.device_data<G>(), grads.numel(), sums.device_data<double>());
  });
}

void ordered_sums(const Tensor& sums, std::span<const BlockRun> all, const Tensor& out) {
  double* to = out.device_data<double>();
  while (!all.empty()) {
    const std::span<const BlockRun> now = all.first(std::min<size_t>(all.size(), kMaxRuns));
    Runs runs{};
    std::copy(now.begin(), now.end(), runs.of);
    launch(context(sums), "ordered_sums", {.blocks = static_cast<int64_t>(now.size()), .threads = kGroups},
           ordered_sums_kernel, runs, sums.device_data<double>(), to);
    to += now.size();
    all = all.subspan(now.size());
  }
}

Tensor sums_of_squares(std::span<const Tensor> tensors) {
  std::vector<BlockRun> runs;
  int64_t blocks = 0;
  for (const Tensor& t : tensors) {
    runs.push_back({.begin = blocks, .count = norm_blocks(t.numel())});
    blocks += runs.back().count;
  }
  const Tensor sums = tensors[0].make({blocks}, DType::float64, Category::workspace);
  const Tensor out = sums.make({static_cast<int64_t>(runs.size())}, DType::float64, Category::workspace);
  for (size_t i = 0; i < tensors.size(); ++i)
    cuda::block_sums(tensors[i], sums.narrow(0, runs[i].begin, runs[i].count));
  cuda::ordered_sums(sums, runs, out);
  return out;
}

}  // namespace tessera::cuda
