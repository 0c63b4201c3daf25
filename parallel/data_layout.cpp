// Shard ranges, and transfers between rank 0 and the others.
#include "parallel/data_layout.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "optim/grad_norm.h"
#include "tensor/ops/cross_entropy.h"

namespace tessera {

namespace {

constexpr int kBatchTag = 7001;

Tensor gather_from_owners(Communicator& axis, int owners, int64_t size, const Tensor& shard) {
  if (axis.rank() > 0) {
    if (shard.defined() && shard.numel() > 0) axis.send(shard, 0, kBatchTag);
    return {};
  }
  Tensor full = shard.make({size}, shard.dtype(), Category::workspace);
  for (int k = 0; k < owners; ++k) {
    const Range range = shard_range(size, owners, k);
    Tensor slice = full.narrow(0, range.begin, range.size());
    if (k == 0)
      slice.copy_from(shard);
    else if (range.size() > 0)
      axis.recv(slice, k, kBatchTag);
  }
  return full;
}

Tensor gather_shards(Communicator& axis, int64_t size, const Tensor& shard) {
  const bool root = axis.rank() == 0;
  const Shape padded{shard_size(size, axis.size()) * axis.size()};
  const Tensor full =
      root ? shard.make(padded, shard.dtype(), Category::workspace) : Tensor::meta(padded, shard.dtype());
  axis.gather(shard, full, 0);
  return root ? full.narrow(0, 0, size) : Tensor();
}

}  // namespace

int64_t shard_size(int64_t size, int owners) { return norm_blocks((size + owners - 1) / owners) * kNormBlock; }

Range shard_range(int64_t size, int owners, int rank) {
  const int64_t shard = shard_size(size, owners), index = std::min(rank, owners);
  return {std::min(index * shard, size), rank < owners ? std::min((index + 1) * shard, size) : size};
}

void check_servers(int servers, int ranks) {
  if (servers < 1 || servers > ranks)
    throw FieldError("servers", "expected 1 to " + std::to_string(ranks) + " (servers run on worker ranks), got " +
                                    std::to_string(servers));
}

Tensor gather_unit(Communicator& axis, const DataLayout& layout, size_t unit, const Tensor& shard) {
  checked_index("gather_unit", "a unit", static_cast<int64_t>(unit), std::ssize(layout.sizes));
  if (layout.sharding == ShardingKind::by_owners)
    return gather_from_owners(axis, layout.owners, layout.sizes[unit], shard);
  if (layout.sharding == ShardingKind::in_shards) return gather_shards(axis, layout.sizes[unit], shard);
  return axis.rank() == 0 ? shard : Tensor();
}

DataBatches::DataBatches(Communicator& axis, ArenaPtr arena, const Options& options)
    : axis_(axis), arena_(std::move(arena)), options_(options) {
  options_.through_root = options.through_root && axis.size() > 1;
  if (options.copies < 1 || axis.size() % options.copies != 0)
    throw FieldError("copies", "expected a divisor of the number of ranks, got " + std::to_string(options.copies));
}

BatchSlice DataBatches::batch_slice(int rank, int64_t batch, int64_t microbatches, int64_t index) const {
  const int ranks = axis_.size() / options_.copies;
  const int64_t slices = ranks * microbatches;
  if (slices < 1 || batch < 1 || batch % slices != 0)
    throw FieldError("batch", "expected a multiple of " + std::to_string(ranks) + " data ranks x " +
                                  std::to_string(microbatches) + " micro-batches, got " + std::to_string(batch));
  checked_index("batches", "a micro-batch", index, microbatches);
  const int64_t size = batch / slices;
  return {(rank * microbatches + index) * size, size};
}

BatchSlice DataBatches::computes(int64_t batch, int64_t microbatches, int64_t index) const {
  return batch_slice(axis_.rank() / options_.copies, batch, microbatches, index);
}

std::vector<BatchSlice> DataBatches::moves(int64_t batch, int64_t microbatches, int64_t index) const {
  if (!options_.through_root) return {computes(batch, microbatches, index)};
  std::vector<BatchSlice> all;
  for (int r = 0; r < axis_.size(); ++r) all.push_back(batch_slice(r, batch, microbatches, index));
  return all;
}

std::vector<BatchSlice> DataBatches::loads(int64_t batch, int64_t microbatches, int64_t index) const {
  if (options_.through_root && !root()) return {};
  return moves(batch, microbatches, index);
}

// int32 (B, T) on rank 0 -> (B / n, T).
Tensor DataBatches::scatter_batch(const Tensor& ids) const {
  if (!options_.through_root) return ids;
  const int64_t rows = root() ? ids.dim(0) / axis_.size() : ids.dim(0);
  Tensor own = Tensor::empty({rows, ids.dim(1)}, DType::int32, arena_, Category::communication);
  axis_.scatter(root() ? ids.contiguous() : Tensor(), own, 0);
  return own;
}

// (N, V) -> (n N, V) on rank 0.
Tensor DataBatches::gather_logits(const Tensor& own) const {
  Tensor all;
  if (root())
    all = Tensor::empty({own.dim(0) * axis_.size(), own.dim(1)}, own.dtype(), arena_, Category::communication);
  axis_.gather(own, all, 0);
  return all;
}

struct DataBatches::RootLoss {
  Tensor gradient, sums;
};

// Each rank's loss is summed separately, in the order of that rank; the gradients then overwrite the logits.
DataBatches::RootLoss DataBatches::losses_at_root(Tensor logits, const Tensor& targets, double scale) const {
  const int n = axis_.size();
  const int64_t rows = logits.dim(0) / n;
  const Tensor sums = Tensor::empty({n}, DType::float64, arena_->host(), Category::communication);
  Tensor lse;
  for (int r = 0; r < n; ++r) {
    const CrossEntropy own = cross_entropy(logits.narrow(0, r * rows, rows), targets.narrow(0, r * rows, rows));
    sums.data<double>()[r] = own.loss_sum;
    if (!lse.defined()) lse = own.lse.make({n * rows}, own.lse.dtype(), Category::communication);
    lse.narrow(0, r * rows, rows).copy_from(own.lse);
  }
  return {cross_entropy_backward(std::move(logits), targets, lse, scale), sums};
}

Root DataBatches::loss(const Var& hidden, const Tensor& targets, double scale, const Head& head) const {
  if (!options_.through_root) {
    Loss loss = head.loss(hidden, targets.contiguous().reshape({-1}), scale);
    return {std::move(loss.mean), {}, loss.loss_sum};
  }
  Var logits = head.logits(hidden);
  const Var edge = logits.edge();
  Tensor own = std::move(logits).take();
  const Shape shape = own.shape();
  const int64_t sequences = hidden.dim(0), tokens = hidden.dim(1), longest = targets.dim(1), vocab = own.dim(1);
  const auto here = [&](const Tensor& rows) { return rows.reshape({sequences, longest, vocab}).narrow(1, 0, tokens); };
  if (longest > tokens) {  // another rank has longer rows
    const Tensor padded = own.make({sequences * longest, vocab}, own.dtype(), Category::communication);
    Tensor(padded).fill(0);
    here(padded).copy_from(own.reshape({sequences, tokens, vocab}));
    own = padded;
  }
  const Tensor sum = Tensor::empty({1}, DType::float64, arena_->host(), Category::communication);
  RootLoss at_root;
  Tensor all = gather_logits(own);
  if (root()) at_root = losses_at_root(std::move(all), targets.contiguous().reshape({-1}), scale);
  if (!own.unique()) own = own.make(own.shape());  // the model still uses its logits
  axis_.scatter(at_root.sums, sum, 0);
  axis_.scatter(at_root.gradient, own, 0);
  if (longest > tokens) own = here(own).contiguous().reshape(shape);
  return {edge, std::move(own), sum.item<double>()};
}

}  // namespace tessera
