// The choice of a strategy, and what most of them do alike: every rank for itself until gradients are summed.
#include "parallel/data_strategy.h"

#include "autograd/ops.h"
#include "parallel/data_parallel.h"
#include "parallel/ddp.h"
#include "parallel/parameter_server.h"
#include "parallel/zero.h"

namespace tessera {

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

double DataStrategy::run(const ModelCalls& model, const Tensor& ids, const Tensor& targets, double scale) {
  const Loss loss = cross_entropy(model.logits(ids), targets.contiguous().reshape({-1}), scale);
  backward(loss.mean);
  return loss.loss_sum;
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
