// Ranges, and their way to rank 0.
#include "parallel/data_layout.h"

#include <algorithm>
#include <string>

#include "optim/grad_norm.h"
#include "tensor/field_error.h"

namespace tessera {
namespace {

constexpr int kTag = 7001;

Tensor gather_from_owners(Communicator& axis, int owners, int64_t size, const Tensor& shard) {
  if (axis.rank() > 0) {
    if (shard.defined() && shard.numel() > 0) axis.send(shard, 0, kTag);
    return {};
  }
  Tensor whole = shard.make({size}, shard.dtype(), Category::workspace);
  for (int k = 0; k < owners; ++k) {
    const Range range = shard_range(size, owners, k);
    Tensor part = whole.narrow(0, range.begin, range.size());
    if (k == 0)
      part.copy_from(shard);
    else if (range.size() > 0)
      axis.recv(part, k, kTag);
  }
  return whole;
}

Tensor gather_shards(Communicator& axis, int64_t size, const Tensor& shard) {
  const bool root = axis.rank() == 0;
  const Shape padded{shard_size(size, axis.size()) * axis.size()};
  const Tensor whole =
      root ? shard.make(padded, shard.dtype(), Category::workspace) : Tensor::meta(padded, shard.dtype());
  axis.gather(shard, whole, 0);
  return root ? whole.narrow(0, 0, size) : Tensor();
}

}  // namespace

int64_t shard_size(int64_t size, int owners) { return norm_blocks((size + owners - 1) / owners) * kNormBlock; }

Range shard_range(int64_t size, int owners, int rank) {
  const int64_t piece = shard_size(size, owners), index = std::min(rank, owners);
  return {std::min(index * piece, size), rank < owners ? std::min((index + 1) * piece, size) : size};
}

void check_servers(int servers, int ranks) {
  if (servers < 1 || servers > ranks)
    throw FieldError("servers", "expected 1 to " + std::to_string(ranks) +
                                    " (servers live beside the workers), found " + std::to_string(servers));
}

Tensor gather_unit(Communicator& axis, const DataLayout& layout, size_t unit, const Tensor& shard) {
  if (layout.kept == Kept::by_owners) return gather_from_owners(axis, layout.owners, layout.sizes[unit], shard);
  if (layout.kept == Kept::in_shards) return gather_shards(axis, layout.sizes[unit], shard);
  return axis.rank() == 0 ? shard : Tensor();
}

}  // namespace tessera
