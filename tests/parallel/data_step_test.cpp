// A step object makes the calls of a step in order, and reduces gradients once.
#include "parallel/data_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

#include "models/decoder.h"
#include "parallel/comm/launch.h"
#include "tests/support/strategy.h"

namespace tessera {
namespace {

// Parameters on rank 0 after two steps of two micro-batches on two ranks.
std::vector<float> train(const StrategyOptions& options, bool as_object) {
  std::vector<float> values;
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& world) {
    const ArenaPtr arena = make_arena();
    const ModelConfig config{.layers = 1, .heads = 2, .channels = 16, .context = 4, .vocab = 8};
    Decoder model(config);
    const auto strategy = make_data_strategy(model, world, arena, {.strategy = options, .microbatches = 2, .seed = 3});
    const auto optimizer = make_optimizer(OptimizerKind::adamw, strategy->shards(), {});
    const auto loss = [&](int64_t i) {
      const std::vector<int32_t> ids{0, 1, 2, static_cast<int32_t>(i + 4 * world.rank())};
      const Tensor tokens = Tensor::of<int32_t>(ids, {1, 4}, arena);
      return model.loss(tokens, tokens, 1.0 / 16).mean;
    };
    for (int64_t i = 0; i < 2; ++i) {
      if (as_object) {
        DataStep step(*strategy);
        for (int64_t j = 0; j < 2; ++j) step.backward(loss(2 * i + j));
        step.reduce();
        EXPECT_FALSE(strategy->awaits_gradients());
        step.update(*optimizer, 0.01);  // does not reduce again
      } else {
        strategy->begin_step();
        for (int64_t j = 0; j < 2; ++j) {
          const Var root = loss(2 * i + j);
          strategy->begin_gradients(j);
          backward(root);
          strategy->end_gradients(j);
        }
        strategy->reduce_gradients();
        optimizer->step(0.01, 1);
        strategy->gather_parameters();
      }
    }
    for (const FlatUnit& unit : strategy->resident_units())
      if (world.rank() == 0) std::ranges::copy(unit.values.to_vector<float>(), std::back_inserter(values));
  });
  return values;
}

TEST(DataStep, EqualsSeparateCalls) {
  for (const StrategyOptions& options :
       std::vector<StrategyOptions>{DdpOptions{}, ZeroOptions{.stage = 2}, ZeroOptions{.stage = 3},
                                    DataParallelOptions{}, ParameterServerOptions{}, DilocoOptions{}})
    EXPECT_EQ(train(options, true), train(options, false)) << options.index();
}

}  // namespace
}  // namespace tessera
