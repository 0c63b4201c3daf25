// Ranges, and their way to rank 0.
#include "parallel/server_cut.h"

#include <algorithm>
#include <string>

#include "optim/grad_norm.h"

namespace tessera {
namespace {

constexpr int kTag = 7001;

}  // namespace

void check_servers(int servers, int ranks) {
  if (servers < 1 || servers > ranks)
    throw Error("--servers: expected 1 to " + std::to_string(ranks) + " (servers live beside the workers), found " +
                std::to_string(servers));
}

Range served_range(int64_t size, int servers, int rank) {
  const int64_t piece = norm_blocks((size + servers - 1) / servers) * kNormBlock;
  const int64_t index = std::min(rank, servers);
  return {std::min(index * piece, size), rank < servers ? std::min((index + 1) * piece, size) : size};
}

Tensor gather_served(Communicator& axis, int servers, int64_t size, const Tensor& shard) {
  if (axis.rank() > 0) {
    if (shard.defined() && shard.numel() > 0) axis.send(shard, 0, kTag);
    return {};
  }
  Tensor whole = shard.make({size}, shard.dtype(), Category::workspace);
  for (int k = 0; k < servers; ++k) {
    const Range range = served_range(size, servers, k);
    Tensor part = whole.narrow(0, range.begin, range.size());
    if (k == 0)
      part.copy_from(shard);
    else if (range.size() > 0)
      axis.recv(part, k, kTag);
  }
  return whole;
}

}  // namespace tessera
