// The cost of each rank of DataParallel: what it loads, moves and holds, as numbers worked by hand; what it refuses.

#include "parallel/comm/fake_transport.h"
#include "parallel/comm/launch.h"
#include "tests/support/errors.h"
#include "tests/support/strategy.h"

namespace tessera {
namespace {

const ModelConfig kConfig{.layers = 1, .heads = 2, .channels = 16, .context = 4, .vocab = 8};

TEST(DataParallelCost, TheRootLoadsForAll) {
  launch({.ranks = 3, .timeout_s = 20}, [](Communicator& world) {
    Decoder model(kConfig);
    const auto strategy =
        make_data_strategy(model, world, make_arena(), {.mode = DataMode::dataparallel, .microbatches = 2});
    const BatchSlice own = strategy->batches().computes(12, 2, 1);
    EXPECT_EQ(own.first, std::vector<int64_t>({2, 6, 10})[static_cast<size_t>(world.rank())]);
    EXPECT_EQ(own.count, 2);
    std::vector<int64_t> firsts;
    for (const BatchSlice& s : strategy->batches().loads(12, 2, 1)) firsts.push_back(s.first);
    EXPECT_EQ(firsts, world.rank() == 0 ? std::vector<int64_t>({2, 6, 10}) : std::vector<int64_t>());
    EXPECT_EQ(strategy->shards().empty(), world.rank() != 0);
  });
}

// One block of 16 channels, 8 tokens in the vocabulary, 4 positions; slots of 16 elements: 128 + 64 for the embeddings,
// 32 + 768 + 48 + 256 + 16 + 32 + 1024 + 64 + 1024 + 16 for the block, 32 for the last norm: 3,504 parameters.
struct Cost {
  OpCounts counts{};
  int64_t parameters = 0, gradients = 0, communication = 0;  // bytes: the first two live, the last its peak
};

// The costs of one step of two micro-batches of one sequence on each of three ranks, in fp32.
std::vector<Cost> costs_of_a_step() {
  std::vector<Cost> costs(3);
  launch({.ranks = 3, .threads_per_rank = 1, .timeout_s = 20}, [&](Communicator& world) {
    const ArenaPtr arena = make_arena();
    Decoder model(kConfig);
    const auto strategy = make_data_strategy(model, world, arena, {.mode = DataMode::dataparallel, .microbatches = 2});
    const int64_t rows = world.rank() == 0 ? 3 : 1;
    const Tensor ids =
        world.rank() == 0 ? Tensor::zeros({rows, 4}, DType::int32, arena) : Tensor::meta({rows, 4}, DType::int32);
    world.reset_counts();
    strategy->begin_step();
    for (int64_t j = 0; j < 2; ++j) test::run_microbatch(*strategy, model, ids, ids, 1.0 / 24, j);
    strategy->finish_gradients();
    unit_sums(*strategy);
    strategy->share_parameters();
    costs[static_cast<size_t>(world.rank())] = {world.counts(), arena->usage(Category::parameters).live,
                                                arena->usage(Category::gradients).live,
                                                arena->usage(Category::communication).peak};
  });
  return costs;
}

TEST(DataParallelCost, BytesAreThoseWorkedByHand) {
  const std::vector<Cost> costs = costs_of_a_step();
  const auto count = [&](size_t rank, Op op) { return costs[rank].counts[static_cast<size_t>(op)]; };
  // Twice, to two ranks each: ids of 16 bytes, a loss of 8, gradients of the logits of 4 x 8 x 4.
  EXPECT_EQ(count(0, Op::scatter), (OpCount{6, 2 * 2 * (16 + 8 + 128)}));
  EXPECT_EQ(count(0, Op::broadcast), (OpCount{1, 2 * 14016}));
  EXPECT_EQ(count(0, Op::gather), (OpCount{2, 0}));
  EXPECT_EQ(count(0, Op::reduce), (OpCount{1, 0}));
  EXPECT_EQ(count(0, Op::all_reduce),
            (OpCount{1, 40}));  // the norm of four units: three numbers to their owners, its own to two ranks
  for (const size_t rank : {1U, 2U}) {
    EXPECT_EQ(count(rank, Op::gather), (OpCount{2, 2 * 128}));
    EXPECT_EQ(count(rank, Op::reduce), (OpCount{1, 14016}));
    EXPECT_EQ(count(rank, Op::scatter), (OpCount{6, 0}));
    EXPECT_EQ(count(rank, Op::broadcast), (OpCount{1, 0}));
  }
}

TEST(DataParallelCost, MemoryIsThatWorkedByHand) {
  const std::vector<Cost> costs = costs_of_a_step();
  EXPECT_EQ(costs[0].parameters, 14016);
  EXPECT_EQ(costs[0].gradients, 14016);
  // Its ids 16, the losses 24, its own 8, all logits 3 x 128, their log-sum-exp 12 x 4.
  EXPECT_EQ(costs[0].communication, 16 + 24 + 8 + 384 + 48);
  for (const size_t rank : {1U, 2U}) {
    EXPECT_EQ(costs[rank].parameters, 0);
    EXPECT_EQ(costs[rank].gradients, 0);
    EXPECT_EQ(costs[rank].communication, 2 * 14016 + 16 + 8);  // a copy of the parameters, gradients, ids, its loss
  }
}

std::string refusal(Communicator& axis, const DataOptions& options) {
  return error_of([&] {
    Decoder model(kConfig);
    make_data_strategy(model, axis, make_arena(), options)->batches().computes(10, options.microbatches, 0);
  });
}

TEST(DataParallelCost, WhatCannotBeIsRefused) {
  launch({.ranks = 2, .timeout_s = 20}, [](Communicator& world) {
    EXPECT_EQ(refusal(world, {.mode = DataMode::dataparallel, .zero = 2}),
              "`zero`: dataparallel keeps everything on rank 0, so there is no stage 2 of it; expected 0, or ddp "
              "instead of dataparallel");
    EXPECT_EQ(refusal(world, {.mode = DataMode::ps_async}),
              "[data parallel] ps-async has no steps that all ranks make; expected ddp, dataparallel or ps-sync");
    EXPECT_EQ(refusal(world, {.mode = DataMode::dataparallel, .microbatches = 3}),
              "`batch`: expected a multiple of 2 data ranks x 3 micro-batches, found 10");
  });
  Communicator fake(std::make_unique<FakeTransport>(0, 8), "dp");
  EXPECT_EQ(refusal(fake, {.mode = DataMode::dataparallel}),
            "[data parallel] dataparallel is for threads of one process, found fake ranks; use ddp");
}

}  // namespace
}  // namespace tessera
