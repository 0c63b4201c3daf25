// A program that uses Tessera with a custom model, dataset and loss. It trains a small network on one rank, and then on
// four ranks, each of which computes a quarter of every batch: the final losses are bitwise identical.
#include <tessera/tessera.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

using namespace tessera;

constexpr int64_t kBatch = 256, kSteps = 200;

// (N, 2) -> (N, 1), with 32 hidden channels.
class Network : public Module {
 public:
  Var forward(const Var& x) override { return out_(hidden_(x)); }

 private:
  Linear& hidden_ = child<Linear>("hidden", 2, 32,
                                  Linear::Options{.deviation = 1, .activation = ActivationOptions{Activation::gelu}});
  Linear& out_ = child<Linear>("out", 32, 1, Linear::Options{.deviation = 0.2});
};

// Samples of a step's batch (N, 3): a point in the plane, and its height, which the network learns. A sample
// depends only on its index and the step, so it is the same on every rank.
Tensor make_batch(int64_t step, BatchSlice slice, const ArenaPtr& arena) {
  const Philox random = Philox::named(1, "points");
  std::vector<float> samples;
  for (int64_t i = slice.first; i < slice.first + slice.count; ++i) {
    const float x = 2 * random.uniform(2 * i, step) - 1, y = 2 * random.uniform(2 * i + 1, step) - 1;
    samples.insert(samples.end(), {x, y, std::sin(3 * x) * y});
  }
  return Tensor::of<float>(samples, {slice.count, 3}, arena);
}

// The squared error, divided by the size of the global batch, so that the sum over all ranks is the mean.
Var loss(const Var& output, const Var& heights) { return scale(sum(unary<Square>(output - heights)), 1.0 / kBatch); }

// Trains on the ranks of `world` with a strategy. Each rank computes `parts` micro-batches of every batch. Returns the
// loss of the last step.
double train(Communicator& world, int64_t parts, const StrategyOptions& options) {
  const ArenaPtr arena = world.make_arena();
  Network network;
  const auto strategy =
      make_data_strategy(network, world, arena, {.strategy = options, .microbatches = parts, .seed = 1});
  const auto optimizer = make_optimizer(OptimizerKind::adamw, strategy->shards(), {.weight_decay = 0.01});
  double total = 0;
  for (int64_t i = 0; i < kSteps; ++i) {
    DataStep step(*strategy);
    total = 0;
    for (int64_t part = 0; part < parts; ++part) {
      const Tensor samples = make_batch(i, strategy->batches().computes(kBatch, parts, part), arena);
      const Var output = network(Var(samples.narrow(1, 0, 2)));
      const Var part_loss = loss(output, Var(samples.narrow(1, 2, 1)));
      step.backward(part_loss);
      total += part_loss.value().item<float>();
    }
    step.update(*optimizer, 0.01);  // with the gradients of all ranks
    total = world.sum(total);
  }
  return total;
}

}  // namespace

int main() {
  double alone = 0, together = 0, sharded = 0;
  launch({.ranks = 1, .threads_per_rank = 1}, [&](Communicator& world) { alone = train(world, 4, DdpOptions{}); });
  launch({.ranks = 4, .threads_per_rank = 1}, [&](Communicator& world) {
    const double ddp = train(world, 1, DdpOptions{}), zero3 = train(world, 1, ZeroOptions{.stage = 3});
    if (world.rank() == 0) together = ddp, sharded = zero3;
  });
  std::printf("one rank: loss %.17g\nfour:     loss %.17g, with ZeRO-3 %.17g\n", alone, together, sharded);
  return alone == together && alone == sharded ? 0 : 1;
}
