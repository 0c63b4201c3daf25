// DDP's buckets: send times, count, and independence of results from the bucket size.
#include "parallel/ddp.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <vector>

#include "optim/optimizer.h"
#include "parallel/comm/launch.h"
#include "parallel/comm/trace.h"
#include "tests/parallel/tiny_gpt.h"

namespace tessera {
namespace {

constexpr int64_t kMicrobatches = 3;
constexpr uint64_t kSeed = 5;

// What one rank's trace shows; times in seconds.
struct Watched {
  std::vector<TraceEvent> reductions;      // all-reduces of one step
  std::vector<double> begins, ends;        // when each micro-batch's backward pass begins and ends
  double head = 0, block = 0, lookup = 0;  // when the last backward pass reaches these modules
  std::vector<ReductionSpan> cut;
  int64_t parameters = 0;
  test::Bytes values;  // of units, after all steps
};

// Records when the backward pass leaves a module.
void note_backward(Module& module, const Trace& trace, std::vector<double>& when) {
  module.wrap([&](const Module::Inner& inner, const Var& x) {
    return on_backward(inner(x), [&] { when.push_back(trace.now()); });
  });
}

void one_step(Decoder& model, Ddp& ddp, const ArenaPtr& arena, const Trace& trace, int rank, int64_t step,
              Watched& watched) {
  const int64_t tokens = 12 * model.config.context;
  ddp.begin_step();
  for (int64_t j = 0; j < kMicrobatches; ++j) {
    ddp.begin_gradients(j);
    const int64_t first = (rank * kMicrobatches + j) * 2;
    const test::Sequences s = test::sequences(model.config, step, first, 2, arena);
    model.set_step({.seed = kSeed, .step = step, .first_sequence = first, .training = true});
    const Loss loss = model.loss(s.ids, s.targets, 1.0 / static_cast<double>(tokens));
    watched.begins.push_back(trace.now());
    backward(loss.mean);
    watched.ends.push_back(trace.now());
    ddp.end_gradients(j);
  }
  ddp.reduce_gradients();
}

// Runs a few steps on two ranks and returns rank 1's record of the first.
Watched watch(int64_t bucket_bytes, Algorithm algorithm = Algorithm::direct) {
  Watched out;
  launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60, .algorithm = algorithm}, [&](Communicator& world) {
    const ArenaPtr arena = make_arena();
    Decoder model(test::tiny_gpt(0.1));
    Ddp ddp(model, world, arena, {.microbatches = kMicrobatches, .seed = kSeed}, {.bucket_bytes = bucket_bytes});
    const auto optimizer = make_optimizer(OptimizerKind::sgd, ddp.shards(), {});
    Trace trace;
    std::vector<double> tied, block;
    note_backward(model.tokens, trace, tied);
    note_backward(*model.blocks[0], trace, block);
    Watched watched;
    world.set_trace(&trace);
    one_step(model, ddp, arena, trace, world.rank(), 0, watched);
    world.set_trace(nullptr);
    optimizer->step(0.1, 1);
    watched.reductions = trace.events();
    ASSERT_EQ(tied.size(), 2U * kMicrobatches);
    watched.head = tied[tied.size() - 2];
    watched.lookup = tied.back();
    watched.block = block.back();
    watched.cut = ddp.layout().reductions;
    watched.parameters = model.parameter_count();
    for (int64_t step = 1; step < 4; ++step) {
      one_step(model, ddp, arena, trace, world.rank(), step, watched);
      optimizer->step(0.1, 1);
    }
    for (const FlatUnit& unit : ddp.shards()) watched.values.push_back(test::bytes(unit.values));
    if (world.rank() == 1) out = watched;
  });
  return out;
}

// One bucket per parameter: its all-reduce starts as soon as its gradient is complete.
TEST(Ddp, BucketsAreReducedDuringLastBackward) {
  const Watched w = watch(1);
  const double end = w.ends[kMicrobatches - 1];
  ASSERT_GT(w.reductions.size(), 20U);
  for (const TraceEvent& e : w.reductions) {
    EXPECT_EQ(e.what, "all_reduce");
    EXPECT_GT(e.requested, w.begins[kMicrobatches - 1]) << "a micro-batch that is not the last was summed";
    EXPECT_LT(e.requested, end) << "a bucket waited for the end of the backward pass";
    EXPECT_LE(e.requested, e.begin);
  }
  const TraceEvent& first = w.reductions.front();  // the last norm's bias
  EXPECT_GT(first.requested, w.head);
  EXPECT_LT(first.requested, w.block) << "before the last block";
  EXPECT_LT(first.requested, w.lookup);
}

// The token embedding is also the head and is declared first, so it is in the last bucket.
TEST(Ddp, TiedWeightIsReducedAfterBothUses) {
  for (const int64_t bytes : {int64_t{1}, int64_t{4000}, int64_t{1} << 30}) {
    const Watched w = watch(bytes);
    EXPECT_EQ(w.cut.back().range.begin, 0);
    EXPECT_EQ(w.reductions.back().bytes, w.cut.back().range.size() * 4);
    EXPECT_GT(w.reductions.back().requested, w.lookup);
    EXPECT_GT(w.lookup, w.head);
  }
}

// Elements: 37 * 24 = 888 and 10 * 24 = 240 for the embeddings; in each block 24 + 24, 1728 + 72, 576 + 24, 24 + 24,
// 2304 + 96 and 2304 + 24; and 24 + 24 for the last norm. Sizes are rounded up to multiples of 16: 888 to 896, 72 to 80
// and 24 to 32.
constexpr int64_t kBlock = 32 + 32 + 1728 + 80 + 576 + 32 + 32 + 32 + 2304 + 96 + 2304 + 32;
constexpr int64_t kElements = 896 + 240 + 2 * kBlock + 32 + 32;

TEST(Ddp, BucketSizeDeterminesBucketCount) {
  const std::vector<std::pair<int64_t, size_t>> cases = {
      // bucket bytes, number of buckets
      {1, 2 + 2 * 12 + 2},     // one per parameter
      {4 * kElements, 1},      // all
      {4 * kElements + 1, 1},  // larger than all
      // Buckets from the end: the last norm and the second block; the first block and the positions; the tokens.
      {4 * (kBlock + 64), 3},
  };
  for (const auto& [bytes, calls] : cases) {
    const Watched w = watch(bytes);
    EXPECT_EQ(w.reductions.size(), calls) << bytes;
    ASSERT_EQ(w.cut.size(), calls) << bytes;
    int64_t sent = 0, end = kElements;
    for (size_t b = 0; b < w.cut.size(); ++b) {
      EXPECT_EQ(w.cut[b].range.end, end) << "from the end, without a gap";
      end = w.cut[b].range.begin;
      EXPECT_EQ(w.reductions[b].bytes, 4 * w.cut[b].range.size()) << "sent in that order";
      sent += w.reductions[b].bytes;
    }
    EXPECT_EQ(sent, 4 * kElements);
  }
}

TEST(Ddp, ResultIsIndependentOfBucketSize) {
  for (const Algorithm algorithm : {Algorithm::direct, Algorithm::root, Algorithm::tree}) {
    const Watched full = watch(int64_t{1} << 30, algorithm);
    for (const int64_t bytes : {1, 1000, 5000, 20000})
      EXPECT_TRUE(watch(bytes, algorithm).values == full.values) << bytes << ", " << to_string(algorithm);
  }
}

TEST(Ddp, ParametersWithoutGradientsAreReducedLast) {
  for (const int64_t bucket : {int64_t{1}, int64_t{1} << 30})
    launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& world) {
      const ArenaPtr arena = make_arena();
      Decoder model(test::tiny_gpt(0));
      Ddp ddp(model, world, arena, {.microbatches = 1, .seed = kSeed}, {.bucket_bytes = bucket});
      ddp.begin_step();
      ddp.begin_gradients(0);
      model.set_step({.seed = kSeed, .training = true});
      backward(sum(model.embed(test::sequences(model.config, 0, world.rank(), 1, arena).ids)));  // no block, no norm
      ddp.end_gradients(0);
      ddp.reduce_gradients();
      double total = 0;
      for (const FlatUnit& unit : ddp.shards())
        for (const float g : unit.grads.to_vector<float>()) total += g;
      // Each rank's tokens count once per channel for their row and for the row of their position.
      EXPECT_EQ(total, 2 * 2.0 * static_cast<double>(model.config.context * model.config.channels));
    });
}

TEST(Trace, TimeStartsAtConstruction) {
  const Trace trace;
  EXPECT_GE(trace.now(), 0);
  EXPECT_LT(trace.now(), 60);
}

}  // namespace
}  // namespace tessera
