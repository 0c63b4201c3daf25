// Gradients that are all one have a sum of squares of exactly N, the number of parameters, under every strategy and on
// any number of ranks: no element is left out, none is counted twice, and padding counts for nothing.
#include <gtest/gtest.h>

#include "parallel/comm/launch.h"
#include "tests/parallel/tiny_gpt.h"
#include "tests/support/strategy.h"

namespace tessera {
namespace {

// The part of each slot that lies in this shard.
void fill_with_ones(FlatUnit shard) {
  shard.grads.fill(0);  // memory that the strategy sees
  for (const Slot& slot : shard.slots) {
    const int64_t begin = std::max(slot.begin, int64_t{0});
    const int64_t end = std::min(slot.end(), shard.grads.numel());
    if (begin < end) shard.grads.narrow(0, begin, end - begin).fill(1);
  }
}

void expect_n(int ranks, const DataOptions& options, const ModelConfig& config) {
  std::vector<double> found(static_cast<size_t>(ranks));
  int64_t parameters = 0;
  launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& world) {
    Decoder model(config);
    const auto strategy = make_data_strategy(model, world, make_arena(), options);
    for (const FlatUnit& shard : strategy->shards()) fill_with_ones(shard);
    found[static_cast<size_t>(world.rank())] = test::sum_of_squares(*strategy);
    if (world.rank() == 0) parameters = model.parameter_count();
  });
  for (const double squares : found)
    EXPECT_EQ(squares, static_cast<double>(parameters))
        << name_in(kDataModeNames, options.mode) << ", zero " << options.zero << ", " << options.servers << " servers, "
        << ranks << " ranks, " << name_of(options.grad_dtype);
}

// The first model has units that are smaller than a norm block for each rank, the second odd sizes everywhere.
const std::vector<ModelConfig> kModels = {test::tiny_gpt(0),
                                          {.layers = 3, .heads = 1, .channels = 37, .context = 23, .vocab = 101}};

TEST(AllOnes, DdpAndEveryStageOfZero) {
  for (const ModelConfig& config : kModels)
    for (const DType grads : {DType::float32, DType::bfloat16, DType::float64})
      for (int ranks = 1; ranks <= 4; ++ranks)
        for (int zero = 0; zero <= 3; ++zero)
          expect_n(ranks,
                   {.zero = zero, .dtype = grads == DType::float64 ? grads : DType::bfloat16, .grad_dtype = grads},
                   config);
}

TEST(AllOnes, DataParallelAndTheParameterServer) {
  for (const ModelConfig& config : kModels)
    for (int ranks = 1; ranks <= 4; ++ranks) {
      expect_n(ranks, {.mode = DataMode::dataparallel}, config);
      for (int servers = 1; servers <= ranks; ++servers)
        expect_n(ranks, {.mode = DataMode::ps_sync, .servers = servers}, config);
    }
}

}  // namespace
}  // namespace tessera
