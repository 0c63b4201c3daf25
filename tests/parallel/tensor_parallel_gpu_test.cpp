// Tensor parallelism on a GPU in bfloat16: its products make GELU, its gradient and the gradients of column biases on
// their way, as those of one rank do.

#include "parallel/comm/launch.h"
#include "tensor/kernels.h"
#include "tests/parallel/cut_gpt.h"
#include "tests/support/gpu.h"

namespace tessera {
namespace {

using TensorParallelGpu = test::OnGpu;

const ModelConfig kConfig{.layers = 2, .heads = 2, .channels = 32, .context = 16, .vocab = 40};

test::Batch batch_in(const ArenaPtr& arena) {
  const test::Batch b = test::random_batch(3, kConfig.context, kConfig.vocab, make_arena());
  return {b.ids.to(arena), b.targets.to(arena)};
}

TEST_F(TensorParallelGpu, EpiloguesAreUsed) {
  for (const Placement& between : {I, S(1)})
    launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& tp) {
      const ArenaPtr memory = make_arena(Device::cuda);
      const test::Batch batch = batch_in(memory);
      Decoder model(kConfig);
      model.place({.tp = &tp, .between = between});
      model.materialize(7, memory, DType::bfloat16, DType::float32);
      test::learn_cut(model, batch);
      const KernelLog& log = memory->local<KernelLog>();
      EXPECT_EQ(log.gelu.fused + log.gelu.apart, kConfig.layers);
      EXPECT_EQ(log.gelu_gradient.fused + log.gelu_gradient.apart, kConfig.layers);
      if (!test::emulated()) return;  // the clock decides
      EXPECT_EQ(log.gelu.apart + log.gelu_gradient.apart + log.bias_sums.apart, 0);
      EXPECT_EQ(log.bias_sums.fused, 2 * kConfig.layers);  // one for [q | k | v], and one for the hidden layer
    });
}

// Nothing is fused then.
TEST_F(TensorParallelGpu, DeterministicTheLossAndGradientsAreThoseOfOneRank) {
  for (const Placement& between : {I, S(1)})
    launch({.ranks = 2, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& tp) {
      const ArenaPtr memory = make_arena(Device::cuda);
      memory->local<KernelChoice>().deterministic = true;
      const test::Batch batch = batch_in(memory);
      Decoder model(kConfig), whole(kConfig);
      model.place({.tp = &tp, .between = between});
      for (Decoder* const m : {&model, &whole}) m->materialize(7, memory, DType::float32, DType::float32);
      const double expected = test::learn_whole(whole, batch);
      EXPECT_NEAR(test::learn_cut(model, batch), expected, 1e-5 * expected);
      test::expect_same_gradients(model, whole, tp, 1e-4, between.str());
      const KernelLog& log = memory->local<KernelLog>();
      EXPECT_EQ(log.gelu.fused + log.gelu_gradient.fused + log.bias_sums.fused, 0);
    });
}

}  // namespace
}  // namespace tessera
