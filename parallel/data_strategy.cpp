// The choice of a strategy, and what most of them do alike: every rank for itself until gradients are summed.
#include "parallel/data_strategy.h"

#include <algorithm>
#include <utility>

#include "optim/cuda/grad_norm.h"
#include "optim/grad_norm.h"
#include "parallel/data_parallel.h"
#include "parallel/ddp.h"
#include "parallel/parameter_server.h"
#include "parallel/zero.h"

namespace tessera {
namespace {

// One run of numbers after another.
std::vector<BlockRun> runs_of(const std::vector<int64_t>& counts) {
  std::vector<BlockRun> runs;
  int64_t at = 0;
  for (const int64_t count : counts) {
    runs.push_back({.begin = at, .count = count});
    at += count;
  }
  return runs;
}

}  // namespace

Share DataStrategy::share_of(int rank, int64_t batch, int64_t microbatches, int64_t index) const {
  const int64_t parts = ranks_ * microbatches;
  if (parts < 1 || batch < 1 || batch % parts != 0)
    throw Error("--batch: expected a multiple of " + std::to_string(ranks_) + " data ranks x " +
                std::to_string(microbatches) + " micro-batches, found " + std::to_string(batch));
  const int64_t size = batch / parts;
  return {(rank * microbatches + index) * size, size};
}

Share DataStrategy::computes(int64_t batch, int64_t microbatches, int64_t index) const {
  return share_of(rank_, batch, microbatches, index);
}

std::vector<Share> DataStrategy::loads(int64_t batch, int64_t microbatches, int64_t index) const {
  return {computes(batch, microbatches, index)};
}

Root DataStrategy::loss(const Var& hidden, const Tensor& targets, double scale, const Head& head) {
  Loss loss = head.loss(hidden, targets.contiguous().reshape({-1}), scale);
  return {std::move(loss.mean), {}, loss.loss_sum};
}

DataStrategy::Parts DataStrategy::parts_of_shards(const std::function<bool(const Slot&)>& counts) const {
  Parts parts;
  for (const FlatUnit& shard : shards()) {
    int64_t& count = parts.of_unit.emplace_back(0);
    for (const Slot& slot : shard.slots) {
      const int64_t from = std::max(slot.begin, int64_t{0}),
                    to = std::min(slot.begin + slot.shape.numel(), shard.grads.numel());
      if (from >= to || !counts(slot)) continue;
      parts.tensors.push_back(shard.grads.narrow(0, from, to - from));
      ++count;
    }
  }
  return parts;
}

std::vector<double> DataStrategy::unit_sums(const std::function<bool(const Slot&)>& counts) {
  const Parts parts = parts_of_shards(counts);
  const std::vector<double> squares = sums_of_squares(parts.tensors);
  std::vector<double> sums;
  size_t p = 0;
  for (const int64_t count : parts.of_unit) {
    OrderedSum sum;
    for (int64_t i = 0; i < count; ++i) sum.add(squares[p++]);
    sums.push_back(sum.total());
  }
  add_parts(sums);
  return sums;
}

Tensor DataStrategy::unit_sums_on_gpu() {
  throw Error("[" + std::string(name()) + "] the gradient norm is added up on the host; expected ddp or ZeRO");
}

Tensor DataStrategy::own_sums_on_gpu(const std::function<bool(const Slot&)>& counts) {
  const Parts parts = parts_of_shards(counts);
  Tensor sums =
      shards().front().grads.make({static_cast<int64_t>(shards().size())}, DType::float64, Category::workspace);
  const std::vector<BlockRun> runs = runs_of(parts.of_unit);
  if (parts.tensors.empty()) sums.fill(0);
  if constexpr (kWithCuda)
    if (!parts.tensors.empty()) cuda::ordered_sums(cuda::sums_of_squares(parts.tensors), runs, sums);
  return sums;
}

std::unique_ptr<DataStrategy> make_data_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                                 const DataOptions& options) {
  if (options.mode == "dataparallel") return std::make_unique<DataParallel>(model, axis, arena, options);
  if (options.mode == "ps-sync") return std::make_unique<ParameterServer>(model, axis, arena, options);
  if (options.mode != "ddp")
    throw Error("[data parallel] unknown mode '" + options.mode + "'; expected ddp, dataparallel or ps-sync");
  if (options.zero == 0) return std::make_unique<Ddp>(model, axis, arena, options);
  return std::make_unique<Zero>(model, axis, arena, options);
}

}  // namespace tessera
