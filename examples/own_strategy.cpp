// A custom strategy of the data axis: majority vote (Bernstein et al. 2018, "signSGD with majority vote"). Each rank
// sends the signs of its gradient, and a parameter moves in the direction of the majority.
#include <tessera/tessera.h>

#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

using namespace tessera;

// volume/rank    the signs, in the gradients' type: 2 (n - 1) / n of them once per step
class MajorityVote final : public DataStrategy {
 public:
  MajorityVote(Module& model, Communicator& axis, const ArenaPtr& arena, const DataOptions& options)
      : DataStrategy(model, axis, arena, options, {.name = "majority vote"}) {
    grads_ = make_flat_buffer(Category::parameters, Category::gradients).grads;
    shards_ = residents_;  // each rank updates all parameters
    layout_.reductions = {{{0, grads_.numel()}, grads_.numel()}};
  }
  void reduce_gradients() override {
    model_.zero_missing_gradients();  // zeros for missing gradients
    to_signs();
    axis_.all_reduce(grads_);
    to_signs();
  }
  void gather_parameters() override {}  // all ranks have made the same update

 private:
  void to_signs() {
    float* const g = grads_.data<float>();
    for (int64_t i = 0; i < grads_.numel(); ++i) g[i] = static_cast<float>((g[i] > 0) - (g[i] < 0));
  }
  Tensor grads_;  // gradients of all parameters, in one flat buffer
};

// Trains a GPT on the ranks of `world`; returns the loss of each step.
std::vector<double> train(Communicator& world) {
  constexpr int64_t kBatch = 8, kSteps = 150;
  const ModelConfig config{.layers = 2, .heads = 2, .channels = 32, .context = 16, .vocab = 64};
  const ArenaPtr arena = world.make_arena();
  Decoder model(config);
  MajorityVote strategy(model, world, arena, {.seed = 1});
  const auto optimizer = make_optimizer(OptimizerKind::sgd, strategy.shards(), {.momentum = 0});
  const Sequences sequences = synthetic_sequences(config.vocab, config.context, kBatch, 1);
  std::vector<double> losses;
  for (int64_t i = 0; i < kSteps; ++i) {
    const BatchSlice own = strategy.batches().computes(kBatch, 1, 0);
    const Tensor ids = Tensor::empty({own.count, config.context}, DType::int32, arena),
                 targets = Tensor::empty({own.count, config.context}, DType::int32, arena);
    sequences.load(i, own.first, own.count, ids.data<int32_t>(), targets.data<int32_t>());
    DataStep step(strategy);
    const Loss loss = model.loss(ids, targets, 1.0 / static_cast<double>(kBatch * config.context));
    step.backward(loss.mean);
    step.update(*optimizer, 1e-3);  // every parameter moves by 0.001
    losses.push_back(world.sum(static_cast<double>(loss.loss_sum)) / static_cast<double>(kBatch * config.context));
  }
  return losses;
}

}  // namespace

int main() {
  std::vector<double> losses;
  launch({.ranks = 4, .threads_per_rank = 1}, [&](Communicator& world) {
    const std::vector<double> all = train(world);
    if (world.rank() == 0) losses = all;
  });
  std::printf("four ranks vote: loss %.4f at first, %.4f after %zu steps\n", losses.front(), losses.back(),
              losses.size());
  return losses.back() < 0.8 * losses.front() ? 0 : 1;
}
