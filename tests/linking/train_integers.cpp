// Trains a GPT that counts, on two data ranks: integers only, with `models/` and the layers below. link_test.sh shows
// that no tokenizer, no run directory and no command line is linked.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "models/decoder.h"
#include "parallel/comm/launch.h"
#include "parallel/data_step.h"

int main() {
  using namespace tessera;
  constexpr int64_t kSteps = 60, kSequences = 4, kContext = 16, kVocab = 32;
  double first = 0, last = 0;
  launch({.ranks = 2, .threads_per_rank = 1}, [&](Communicator& world) {
    const ArenaPtr arena = make_arena();
    const auto model = make_model({.layers = 2, .heads = 2, .channels = 32, .context = kContext, .vocab = kVocab});
    const auto strategy = make_data_strategy(*model, world, arena, {.strategy = ZeroOptions{.stage = 2}, .seed = 1});
    const auto optimizer = make_optimizer(OptimizerKind::adamw, strategy->shards(), {});
    const double tokens = static_cast<double>(kSequences * kContext * world.size());
    for (int64_t i = 0; i < kSteps; ++i) {
      std::vector<int32_t> ids, targets;
      for (int64_t s = 0; s < kSequences; ++s)
        for (int64_t t = 0; t < kContext; ++t) {
          ids.push_back(static_cast<int32_t>((7 * i + 5 * s + 11 * world.rank() + t) % kVocab));
          targets.push_back((ids.back() + 1) % static_cast<int32_t>(kVocab));
        }
      const Shape shape{kSequences, kContext};
      DataStep step(*strategy);
      const Loss loss =
          model->loss(Tensor::of<int32_t>(ids, shape, arena), Tensor::of<int32_t>(targets, shape, arena), 1 / tokens);
      step.backward(loss.mean);
      step.update(*optimizer, 1e-2);
      const double mean = world.sum(loss.loss_sum) / tokens;
      if (world.rank() == 0) (i == 0 ? first : last) = mean;
    }
  });
  std::printf("loss %.3f -> %.3f\n", first, last);
  return last < 0.1 * first ? 0 : 1;
}
