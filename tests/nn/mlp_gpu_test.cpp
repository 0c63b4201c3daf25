// Both layers of an Mlp on a GPU: outputs and gradients beside float64 on the CPU, and what its products bring along.

#include "autograd/ops.h"
#include "tensor/kernels.h"
#include "tests/support/gpu.h"
#include "tests/support/tensors.h"

namespace tessera {
namespace {

using test::apart;
using GeluMlpGpu = test::OnGpu;

struct Way {
  bool deferred, recompute, frozen;  // frozen: the first layer's weight, and not its bias
};

// The output and the gradients of numbers that `dtype` has, computed in `as`.
std::vector<Tensor> results(DType dtype, DType as, const ArenaPtr& arena, const Way& way) {
  const auto drawn = [&](const Shape& shape, size_t i) {
    return test::drawn(shape, dtype, "mlp " + std::to_string(i)).to(as).to(arena);
  };
  std::vector<Var> v;
  for (const Shape& shape : {Shape{2, 16, 16}, Shape{40, 16}, Shape{40}, Shape{24, 40}, Shape{24}})
    v.emplace_back(drawn(shape, v.size()), !(way.frozen && v.size() == 1));
  const Var y = gelu_mlp(v[0], {.w = v[1], .b = v[2]}, {.w = v[3], .b = v[4]}, way.recompute);
  DeferredWeightGrads later;
  backward(y, {.seed = drawn({2, 16, 24}, 9), .defer = way.deferred ? &later : nullptr});
  later.run();
  std::vector<Tensor> all{y.value()};
  for (const Var& one : v)
    if (one.requires_grad()) all.push_back(one.grad());
  return all;
}

TEST_F(GeluMlpGpu, GradientsAreThoseOfFloat64) {
  for (const DType dtype : {DType::float32, DType::bfloat16})
    for (const bool deferred : {false, true})
      for (const bool recompute : {false, true})
        for (const bool frozen : {false, true}) {
          const Way way{deferred, recompute, frozen};
          const auto found = results(dtype, dtype, arena, way),
                     exact = results(dtype, DType::float64, make_arena(), way);
          ASSERT_EQ(found.size(), frozen ? 5U : 6U);
          for (size_t i = 0; i < found.size(); ++i)
            EXPECT_LE(apart(found[i], exact[i]), dtype == DType::bfloat16 ? 0.02 : 2e-6)
                << i << " " << name_of(dtype) << (deferred ? " deferred" : "") << (recompute ? " recompute" : "")
                << (frozen ? " frozen" : "");
        }
}

// The emulated library takes every fused way; on a GPU the clock decides.
TEST_F(GeluMlpGpu, WeightsBringBothBiasesAlong) {
  if (!test::emulated()) GTEST_SKIP() << "the clock decides";
  const KernelLog& log = arena->local<KernelLog>();
  results(DType::bfloat16, DType::bfloat16, arena, {false, false, false});
  EXPECT_EQ(log.gelu_gradient.fused, 1);
  EXPECT_EQ(log.bias_sums.fused, 2);
  results(DType::bfloat16, DType::bfloat16, arena, {false, false, true});
  EXPECT_EQ(log.bias_sums.fused, 3);
  EXPECT_EQ(log.gelu.apart + log.gelu_gradient.apart + log.bias_sums.apart, 0);
}

}  // namespace
}  // namespace tessera
