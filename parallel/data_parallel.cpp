// DataParallel: one rank owns everything and the others help it, as torch.nn.DataParallel does with the GPUs of one
// machine. Rank 0 deals out the sequences, every rank makes the forward pass with its copy of the parameters, rank 0
// gathers the logits, makes the loss and deals out the gradient of the logits, every rank makes the backward pass, and
// the gradients are summed on rank 0, which alone has an optimizer. Here to be measured: rank 0 is the bottleneck, in
// bytes and in memory.
//
//             micro-batch                                        end of the step
//   rank 0    ids --+                 +-- loss --+               sum   -- update --+
//                   | scatter         | gather   | scatter        | reduce         | broadcast
//   rank r         ids -> forward -> logits     gradient -> backward -> gradients  parameters
//
// placements     parameters I, gradients P -> rank 0 alone, optimizer state on rank 0 alone
// memory         rank 0: all of parameters, gradients and optimizer state, and the logits of all ranks; others: a copy
//                of the parameters and gradients of their own. Memory that exists only because of the strategy
//                (copies, the others' gradients, dealt out and gathered arrays) counts as communication
// volume         per step, n ranks, m micro-batches of b sequences of T tokens, V vocabulary, Psi parameters:
//                rank 0 sends     (n - 1) (m (4 b T + 8 + e b T V) + e Psi)
//                rank 0 receives  (n - 1) (m e b T V + g Psi)           e bytes of a value, g of a gradient
//                the 8 are a rank's loss, and the gradient norm is one more sum of 8 bytes per unit; targets stay at
//                rank 0
// source         PyTorch 1.0, torch/nn/parallel/data_parallel.py; Li et al. 2020, section 2, on what it costs
//
// PyTorch copies the parameters before every forward pass; here once per step, when they have changed. Gradients of a
// rank's micro-batches are added first, then ranks in rank order (in pairs where the communicator's algorithm is tree),
// so the bits are those of DDP. Rows of a rank have one loss sum of their own, which goes back to it. Tokens, logits
// and losses are moved in parallel/data_strategy.h.
#include "parallel/data_strategy.h"
#include "tensor/error.h"

namespace tessera {

class DataParallel final : public DataStrategy {
 public:
  // Throws Error (usage) with a stage of ZeRO, or when the ranks are not threads of one process.
  DataParallel(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options);

  void reduce_gradients() override;
  void gather_parameters() override;

 private:
  bool root() const { return axis_.rank() == 0; }
  FlatBuffer all_;
};

// Everything on rank 0, nothing on the others.
DataParallel::DataParallel(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options)
    : DataStrategy(model, axis, arena, options, {.name = "dataparallel", .kept = ShardingKind::at_root}) {
  if (options.zero != 0)
    throw FieldError("zero", "dataparallel keeps everything on rank 0, so there is no stage " +
                                 std::to_string(options.zero) + " of it; expected 0, or ddp instead of dataparallel");
  if (axis.kind() != "threads")
    throw Error("[data parallel] dataparallel is for threads of one process, found " + std::string(axis.kind()) +
                "; use ddp");
  const auto category = [&](Category of_root) { return root() ? of_root : Category::communication; };
  all_ = make_flat_buffer(category(Category::parameters), category(Category::gradients));
  if (root()) shards_ = residents_;
  layout_.reductions = {{{0, all_.grads.numel()}, all_.grads.numel()}};
}

// Parameters that no gradient reached have zeros.
void DataParallel::reduce_gradients() {
  model_.zero_missing_gradients();
  axis_.reduce(all_.grads, 0);
}

void DataParallel::gather_parameters() {
  axis_.broadcast(all_.values, 0);
  if (!root()) ++all_.values.storage()->version;  // packed copies of the old values are stale
}

std::unique_ptr<DataStrategy> make_data_parallel(Module& model, Communicator& axis, const ArenaPtr& arena,
                                                 const DataOptions& options) {
  return std::make_unique<DataParallel>(model, axis, arena, options);
}

}  // namespace tessera
