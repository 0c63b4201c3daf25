// Leaves of channels and tokens.
#include "tensor/ops/matmul/leaves.h"

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "tensor/kernels.h"

namespace tessera {

LeafOrder channel_leaves(int64_t size, int64_t leaves, const std::vector<int64_t>& segments) {
  const std::vector<int64_t> sizes = segments.empty() ? std::vector{size} : segments;
  if (std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) != size)
    throw Error("[matmul] segments do not add up to the " + std::to_string(size) + " elements of the contracted dim");
  LeafOrder order;
  int64_t total = 0;
  for (int64_t leaf = 0; leaf < leaves; ++leaf) {
    int64_t first = 0;
    for (const int64_t segment : sizes) {
      const int64_t begin = leaf * segment / leaves, end = (leaf + 1) * segment / leaves;
      if (begin < end) order.runs.push_back({first + begin, end - begin});
      total += end - begin;
      first += segment;
    }
    order.ends.push_back(total);
  }
  return order;
}

LeafOrder token_leaves(int64_t batch, int64_t tokens, int64_t leaves) {
  LeafOrder order;
  const int64_t chunks = 2 * leaves;
  int64_t total = 0;
  for (int64_t leaf = 0; leaf < leaves; ++leaf) {
    for (int64_t b = 0; b < batch; ++b)
      for (const int64_t chunk : {leaf, chunks - 1 - leaf}) {
        const int64_t begin = chunk * tokens / chunks, end = (chunk + 1) * tokens / chunks;
        if (begin < end) order.runs.push_back({b * tokens + begin, end - begin});
        total += end - begin;
      }
    order.ends.push_back(total);
  }
  return order;
}

bool adds_by_leaves(const Tensor& t) { return t.arena()->local<KernelChoice>().layout_invariant; }

}  // namespace tessera
