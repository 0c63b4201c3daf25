// Memory that a block saves between forward and backward, to the byte, and absence of allocations in later steps.
//
// Elements per token saved by one block, in the model's dtype, including its result and excluding its input, for C
// channels, q of queries, k of keys, and F hidden ones: norm1 C, qkv q + 2 k, attention q, the residual sum C, norm2 C,
// the result C, the hidden layer before and after GELU 2 F, or before and after SwiGLU 3 F; with head norms also their
// input, q + 2 k. In addition, 4 bytes each (8 in float64): the log-sum-exp of each head, rstd of two norms, for
// LayerNorm also their means, and with head norms an rstd per head. Recomputing the activation saves F less, norms
// another 2 C, attention q and the log-sum-exp; the full block leaves only C. GPT-2: 16 C, 12 C, 10 C, C (Korthikanti
// et al. 2022 count 34 bytes per element for a block with dropout, excluding a stored attention matrix).
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "models/decoder.h"
#include "optim/grad_norm.h"
#include "optim/optimizer.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 3, kTokens = 40, kLayers = 3;

// Elements per token.
struct Saved {
  int64_t elements, wide_elements;
};

Saved saved_activations(const ModelConfig& c) {
  const bool gpt = c.family == Family::gpt2;
  const int64_t k = c.all_heads().key * c.head_size(), packed = c.attended() + 2 * k;
  if (c.recompute == Recompute::block) return {c.channels, 0};
  Saved saved{4 * c.channels + packed + c.attended() + (gpt ? 2 : 3) * c.hidden(), c.heads + (gpt ? 4 : 2)};
  if (c.qk_norm) saved.elements += packed, saved.wide_elements += c.heads + c.all_heads().key;
  if (c.recompute == Recompute::attention) return {saved.elements - c.attended(), saved.wide_elements - c.heads};
  if (c.recompute != Recompute::none) saved.elements -= c.hidden();
  if (c.recompute == Recompute::activation_norm) saved.elements -= 2 * c.channels;
  return saved;
}

TEST(Memory, BlockActivationsMatchFormula) {
  const ModelConfig gpt{.layers = kLayers, .heads = 4, .channels = 64, .context = kTokens, .vocab = 50};
  ModelConfig llama = gpt, normed = gpt;
  llama.family = normed.family = Family::llama;
  llama.kv_heads = 2, llama.ffn = 112;
  normed.kv_heads = 1, normed.head_dim = 20, normed.qk_norm = true;
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64})
    for (const Recompute mode :
         {Recompute::none, Recompute::activation, Recompute::activation_norm, Recompute::attention, Recompute::block})
      for (ModelConfig config : {gpt, llama, normed}) {
        config.recompute = mode;
        const ArenaPtr arena = make_arena();
        const std::unique_ptr<LanguageModel> model = make_model(config);
        model->materialize(1, arena, dtype, DType::float32);
        Var x(Tensor::zeros({kBatch, kTokens, config.channels}, dtype, arena), true);
        const int64_t before = arena->usage(Category::activations).live;
        arena->reset_peaks();
        for (int64_t i = 0; i < kLayers; ++i) x = model->layer(i)(x);

        const int64_t tokens = kBatch * kTokens, wide = dtype == DType::float64 ? 8 : 4;
        const auto bytes = [&](const Saved& saved) {
          return tokens * (saved.elements * element_size(dtype) + saved.wide_elements * wide);
        };
        const std::string what = std::string(to_string(dtype)) + " mode " + std::to_string(static_cast<int>(mode));
        const Usage usage = arena->usage(Category::activations);
        EXPECT_EQ(usage.live - before, kLayers * bytes(saved_activations(config))) << what;
        // While the last block runs, all its tensors exist, and with head norms some of them twice.
        ModelConfig plain = config;
        plain.recompute = Recompute::none;
        const int64_t upper_bound = (kLayers - 1) * bytes(saved_activations(config)) + bytes(saved_activations(plain));
        if (mode == Recompute::none && !config.qk_norm)
          EXPECT_EQ(usage.peak - before, upper_bound) << what;
        else
          EXPECT_LE(usage.peak - before, upper_bound + tokens * 2 * config.channels * element_size(dtype)) << what;
      }
}

TEST(Memory, BackwardFreesAllActivations) {
  const ArenaPtr arena = make_arena();
  Decoder model({.layers = 2, .heads = 2, .channels = 32, .context = 16, .vocab = 50});
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

// This step's full logits would have 256 MiB. Only one block of that size exists, in addition to saved activations and,
// small here, the embedding's gradient.
TEST(Memory, StepStoresNoFullLogits) {
  const ModelConfig config{.layers = 1, .heads = 1, .channels = 8, .context = 256, .vocab = 65536};
  const int64_t tokens = 4 * config.context, logits = tokens * config.vocab * 4;
  ASSERT_EQ(logits, 4 * kLogitsBytes);
  const ArenaPtr arena = make_arena();
  Decoder model(config);
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

TEST(Memory, CountsParametersGradientsAndOptimizerState) {
  const ArenaPtr arena = make_arena();
  Decoder model({.layers = 2, .heads = 2, .channels = 32, .context = 16, .vocab = 64});
  const int64_t n = model.parameter_count();
  EXPECT_EQ(arena->total().live, 0);  // meta tensors use no memory
  const auto optimizer =
      make_optimizer(OptimizerKind::adamw, model.materialize(1, arena, DType::bfloat16, DType::float32), {});
  EXPECT_EQ(arena->usage(Category::parameters).live, 2 * n);
  EXPECT_EQ(arena->usage(Category::gradients).live, 4 * n);
  EXPECT_EQ(arena->usage(Category::optimizer).live, 12 * n);  // master, m, v
}

TEST(Memory, LaterStepsAllocateNoNewMemory) {
  const ArenaPtr arena = make_arena();
  Decoder model({.layers = 2, .heads = 4, .channels = 64, .context = 32, .vocab = 100, .dropout = 0.1});
  auto& units = model.materialize(1, arena, DType::float32, DType::float32);
  const auto optimizer = make_optimizer(OptimizerKind::adamw, units, {});
  const Tensor ids = Tensor::zeros({4, 32}, DType::int32, arena);
  std::pair<int64_t, int64_t> third;
  for (int64_t step = 0; step < 9; ++step) {
    arena->reset_peaks();
    model.clear_gradients();
    model.set_step({.seed = 1, .step = step, .training = true});
    const Loss loss = model.loss(ids, ids, 1.0 / 128);
    backward(loss.mean);
    model.zero_missing_gradients();
    optimizer->step(1e-3, clip_factor(grad_norm(units), 1));
    const std::pair taken{arena->footprint(), arena->total().peak};
    if (step == 2) third = taken;
    if (step > 2) {
      EXPECT_EQ(taken, third) << step;
    }
  }
}

}  // namespace
}  // namespace tessera
