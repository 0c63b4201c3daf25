// The memory that a block cut over ranks holds between forward and backward, to the byte. Of the elements that the
// whole block holds (tests/models/memory_test.cpp), those inside the attention and the MLP are cut, and with sequence
// parallelism the others too: norm1 1, sum 1, norm2 1, result 1; qkv 3, attention 1, hidden layer 4 + 4. The inputs of
// column layers that were gathered are not kept.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "parallel/comm/launch.h"
#include "tests/parallel/cut_gpt.h"

namespace tessera {
namespace {

constexpr int64_t kBatch = 3, kTokens = 24, kLayers = 3;

struct Kept {
  Recompute mode;
  int64_t around, inside;  // elements of (B, T, C): on every token's way, and inside the attention and the MLP
  bool statistics;         // those of the softmax and of two norms are kept
};
const Kept kModes[] = {{Recompute::none, 4, 12, true},
                       {Recompute::activation, 4, 8, true},
                       {Recompute::activation_norm, 2, 8, true},
                       {Recompute::block, 1, 0, false}};

void check(Communicator& tp, const Kept& kept, const Placement& between, DType dtype) {
  const ModelConfig config{
      .layers = kLayers, .heads = 12, .channels = 48, .context = kTokens, .vocab = 50, .recompute = kept.mode};
  const ArenaPtr arena = make_arena();
  Decoder model(config);
  model.place({.tp = &tp, .between = between});
  model.materialize(1, arena, dtype, DType::float32);
  const int64_t n = tp.size(), around = between == I ? 1 : n;  // ranks that share what is around
  Var x(Tensor::zeros({kBatch, kTokens / around, config.channels}, dtype, arena), true);
  const int64_t before = arena->usage(Category::activations).live;
  for (DecoderBlock* block : model.blocks) x = (*block)(x);
  const int64_t tokens = kBatch * kTokens, wide = dtype == DType::float64 ? 8 : 4;
  const int64_t element = tokens * config.channels * size_of(dtype);
  const int64_t statistics = config.heads * tokens * wide / n + 4 * tokens * wide / around;
  EXPECT_EQ(arena->usage(Category::activations).live - before,
            kLayers * (kept.around * element / around + kept.inside * element / n + (kept.statistics ? statistics : 0)))
      << name_of(dtype) << ", mode " << static_cast<int>(kept.mode) << ", between " << between.str() << ", " << n
      << " ranks";
  EXPECT_EQ(arena->usage(Category::communication).live, 0);
}

TEST(TensorParallelMemory, ABlockHoldsWhatTheFormulaSays) {
  for (const int ranks : {1, 2, 3, 4})
    launch({.ranks = ranks, .threads_per_rank = 1, .timeout_s = 60}, [](Communicator& tp) {
      for (const DType dtype : {DType::float32, DType::bfloat16, DType::float64})
        for (const Kept& kept : kModes)
          for (const Placement& between : {I, S(1)}) check(tp, kept, between, dtype);
    });
}

}  // namespace
}  // namespace tessera
