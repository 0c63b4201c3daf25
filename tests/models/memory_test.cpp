// What a block holds between forward and backward, to the byte, and that a step takes no new memory.
//
// Elements of (B, T, C) = s b h kept by one block, in the model's dtype, counting its result and not its input: norm1
// 1, qkv 3, attention 1, the residual sum 1, norm2 1, the hidden layer before and after GELU 4 + 4, the result 1: 16.
// Beside them the attention's log-sum-exp, 4 bytes for each of a heads per token, and mean and rstd of two norms, 16
// bytes per token. Recomputing GELU keeps 12, GELU and norms 10, the whole block 1 and nothing beside (Korthikanti et
// al. 2022 count 34 bytes per element for a block with dropout, a stored attention matrix apart).
#include <gtest/gtest.h>

#include "models/gpt.h"
#include "optim/grad_norm.h"
#include "optim/optimizer.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 3, kTokens = 40, kLayers = 3;

struct Kept {
  Recompute mode;
  int64_t elements;
  bool statistics;
};
const Kept kModes[] = {{Recompute::none, 16, true},
                       {Recompute::activation, 12, true},
                       {Recompute::activation_norm, 10, true},
                       {Recompute::block, 1, false}};

TEST(Memory, ABlockHoldsWhatTheFormulaSays) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64})
    for (const Kept& kept : kModes) {
      const ModelConfig config{
          .layers = kLayers, .heads = 4, .channels = 64, .context = kTokens, .vocab = 50, .recompute = kept.mode};
      const ArenaPtr arena = make_arena();
      Gpt model(config);
      model.materialize(1, arena, dtype, DType::float32);
      Tensor input = Tensor::zeros({kBatch, kTokens, config.channels}, dtype, arena);
      Var x(input, true);
      const int64_t before = arena->usage(Category::activations).live;
      arena->reset_peaks();
      for (int64_t i = 0; i < kLayers; ++i) x = model.layer(i)(x);

      const int64_t tokens = kBatch * kTokens, wide = dtype == DType::float64 ? 8 : 4;
      const int64_t element = tokens * config.channels * size_of(dtype);
      const int64_t beside = config.heads * tokens * wide + 4 * tokens * wide;
      const int64_t one = kept.elements * element + (kept.statistics ? beside : 0);
      const Usage usage = arena->usage(Category::activations);
      EXPECT_EQ(usage.live - before, kLayers * one) << name_of(dtype) << " mode " << static_cast<int>(kept.mode);
      // While the last block runs it holds all sixteen.
      if (kept.mode == Recompute::none)
        EXPECT_EQ(usage.peak - before, kLayers * one);
      else
        EXPECT_LE(usage.peak - before, (kLayers - 1) * one + 16 * element + beside + element);
    }
}

TEST(Memory, BackwardGivesEverythingBack) {
  const ArenaPtr arena = make_arena();
  Gpt model({.layers = 2, .heads = 2, .channels = 32, .context = 16, .vocab = 50});
  model.materialize(1, arena, DType::float32, DType::float32);
  const Tensor ids = Tensor::zeros({2, 16}, DType::int32, arena);
  const int64_t before = arena->usage(Category::activations).live;
  {
    const Loss loss = model.loss(ids, ids, 1.0 / 32);
    EXPECT_GT(arena->usage(Category::activations).live, before + 100000);
    backward(loss.mean);
    EXPECT_EQ(arena->usage(Category::activations).live, before + 8);  // the loss itself
  }
  EXPECT_EQ(arena->usage(Category::activations).live, before);
}

// The logits of this step would take 256 MiB. One block of them is all there is of that size; beside it are what the
// model keeps and, small here, the gradient of the embedding.
TEST(Memory, AStepHoldsNoLogits) {
  const ModelConfig config{.layers = 1, .heads = 1, .channels = 8, .context = 256, .vocab = 65536};
  const int64_t tokens = 4 * config.context, logits = tokens * config.vocab * 4;
  ASSERT_EQ(logits, 4 * kLogitsBytes);
  const ArenaPtr arena = make_arena();
  Gpt model(config);
  model.materialize(1, arena, DType::float32, DType::float32);
  const Tensor ids = Tensor::zeros({4, config.context}, DType::int32, arena);
  const int64_t held = arena->total().live, table = config.vocab * config.channels * 4;
  for (const bool trains : {true, false}) {
    model.clear_gradients();
    arena->reset_peaks();
    const GradMode mode(trains);
    const Loss loss = model.loss(ids, ids, 1.0 / static_cast<double>(tokens));
    if (trains) backward(loss.mean);
    EXPECT_LT(arena->total().peak - held, kLogitsBytes + 3 * table + (4 << 20)) << trains;
    EXPECT_GT(arena->total().peak - held, kLogitsBytes) << trains;
  }
}

TEST(Memory, ParametersGradientsAndStateAreCounted) {
  const ArenaPtr arena = make_arena();
  Gpt model({.layers = 2, .heads = 2, .channels = 32, .context = 16, .vocab = 64});
  const int64_t n = model.parameter_count();
  EXPECT_EQ(arena->total().live, 0);  // shapes take no memory
  const auto optimizer =
      make_optimizer(OptimizerKind::adamw, model.materialize(1, arena, DType::bfloat16, DType::float32), {});
  EXPECT_EQ(arena->usage(Category::parameters).live, 2 * n);
  EXPECT_EQ(arena->usage(Category::gradients).live, 4 * n);
  EXPECT_EQ(arena->usage(Category::optimizer).live, 12 * n);  // master, m, v
}

TEST(Memory, AStepTakesNoNewMemory) {
  const ArenaPtr arena = make_arena();
  Gpt model({.layers = 2, .heads = 4, .channels = 64, .context = 32, .vocab = 100, .dropout = 0.1});
  auto& units = model.materialize(1, arena, DType::float32, DType::float32);
  const auto optimizer = make_optimizer(OptimizerKind::adamw, units, {});
  const Tensor ids = Tensor::zeros({4, 32}, DType::int32, arena);
  int64_t after_first = 0, peak = 0;
  for (int64_t step = 0; step < 9; ++step) {
    arena->reset_peaks();
    model.clear_gradients();
    model.set_step({.seed = 1, .step = step, .training = true});
    const Loss loss = model.loss(ids, ids, 1.0 / 128);
    backward(loss.mean);
    model.zero_missing_gradients();
    optimizer->step(1e-3, clip_factor(grad_norm(units), 1));
    if (step == 2) {
      after_first = arena->footprint();
      peak = arena->total().peak;
    }
    if (step > 2) {
      EXPECT_EQ(arena->footprint(), after_first) << step;
      EXPECT_EQ(arena->total().peak, peak) << step;
    }
  }
}

}  // namespace
}  // namespace tessera
