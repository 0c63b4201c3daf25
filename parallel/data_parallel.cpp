// DataParallel: rank 0 owns all state, like torch.nn.DataParallel on the GPUs of one machine. Every rank runs forward
// and backward with a copy of the parameters; rank 0 scatters the sequences, computes the loss from the gathered
// logits, and has the only optimizer. This demonstrates the bottleneck: rank 0's traffic and memory.
//
//             micro-batch                                        end of the step
//   rank 0    ids --+                 +-- loss --+               sum   -- update --+
//                   | scatter         | gather   | scatter        | reduce         | broadcast
//   rank r         ids -> forward -> logits     gradient -> backward -> gradients  parameters
//
// placements     parameters I, gradients P -> rank 0 only, optimizer state on rank 0 only
// memory         rank 0: all parameters, gradients and optimizer state, and the logits of all ranks; others: a copy of
//                the parameters and their own gradients. Memory that only the strategy needs counts as communication
// volume         per step, n ranks, m micro-batches of b sequences of T tokens, V vocabulary, Psi parameters:
//                rank 0 sends     (n - 1) (m (4 b T + 8 + e b T V) + e Psi)
//                rank 0 receives  (n - 1) (m e b T V + g Psi)           e bytes per value, g per gradient
//                the 8 bytes are a rank's loss; the norm adds one sum of 8 bytes per unit; targets stay on rank 0
// source         PyTorch 1.0, torch/nn/parallel/data_parallel.py; Li et al. 2020, section 2, on its cost
//
// Unlike PyTorch, which copies the parameters before every forward pass, this strategy copies them once per step, after
// the update. Each rank accumulates its micro-batches; gradients are then reduced in rank order (in pairs if the
// algorithm is tree), so the result is bitwise identical to DDP.
#include <memory>
#include <string>

#include "base/error.h"
#include "parallel/data_strategy.h"

namespace tessera {

class DataParallel final : public DataStrategy {
 public:
  // Throws Error (usage) if the ranks are not threads of one process.
  DataParallel(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options);

  void reduce_gradients() override;
  void gather_parameters() override;

 private:
  bool root() const { return axis_.rank() == 0; }
  FlatBuffer all_;
};

DataParallel::DataParallel(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options)
    : DataStrategy(model, axis, arena, options,
                   {.name = "dataparallel", .sharding = ShardingKind::at_root, .is_ordered = true}) {
  if (axis.kind() != "threads")
    throw Error("[data parallel] dataparallel supports only threads of one process, got " + std::string(axis.kind()) +
                "; use ddp");
  const auto category = [&](Category of_root) { return root() ? of_root : Category::communication; };
  all_ = make_flat_buffer(category(Category::parameters), category(Category::gradients));
  if (root()) shards_ = residents_;
  layout_.reductions = {{{0, all_.grads.numel()}, all_.grads.numel()}};
}

void DataParallel::reduce_gradients() {
  enter(Call::reduce);
  model_.zero_missing_gradients();
  axis_.reduce(all_.grads, 0);
}

void DataParallel::gather_parameters() {
  enter(Call::gather);
  axis_.broadcast(all_.values, 0);
  if (!root()) ++all_.values.storage()->version;  // invalidates packed copies
}

std::unique_ptr<DataStrategy> make_strategy(Module& model, Communicator& axis, const ArenaPtr& arena,
                                            const DataOptions& options, const DataParallelOptions&) {
  return std::make_unique<DataParallel>(model, axis, arena, options);
}

}  // namespace tessera
