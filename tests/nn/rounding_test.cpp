// An update writes bfloat16 values as its float32 master rounded to nearest even.

#include "optim/optimizer.h"
#include "tests/support/gpu.h"
#include "tests/support/nearest.h"
#include "tests/support/units.h"

namespace tessera {
namespace {

void expect_rounded(const ArenaPtr& arena) {
  for (const OptimizerKind kind : {OptimizerKind::sgd, OptimizerKind::adam, OptimizerKind::adamw})
    for (const DType grads : {DType::float32, DType::bfloat16}) {
      const ArenaPtr host = make_arena();
      FlatUnit unit = test::make_unit("unit", {1000, 77}, DType::bfloat16, grads, host);
      test::fill_normal(unit, unit.values, 1, 1);
      test::fill_normal(unit, unit.grads, 2, 1);
      unit.values = unit.values.to(arena);
      unit.grads = unit.grads.to(arena);
      const auto optimizer = make_optimizer(kind, {unit}, {.weight_decay = 0.1});
      for (int step = 0; step < 3; ++step) {
        optimizer->step(0.01, 0.7);
        const std::vector<float> values = unit.values.to(DType::float32).to_vector<float>();
        for (const NamedTensor& state : optimizer->state()) {
          if (!state.name.ends_with(".master")) continue;
          const std::vector<float> master = state.tensor.to_vector<float>();
          int64_t between = 0;
          for (size_t i = 0; i < master.size(); ++i) {
            ASSERT_EQ(values[i], test::nearest_bf16(master[i])) << step << " " << i;
            between += values[i] != master[i] ? 1 : 0;
          }
          EXPECT_GT(between, 1000);
        }
      }
    }
}

TEST(Rounding, OfUpdatesIsToNearestEven) { expect_rounded(make_arena()); }

using RoundingGpu = test::OnGpu;

TEST_F(RoundingGpu, OfUpdatesIsToNearestEven) { expect_rounded(arena); }

}  // namespace
}  // namespace tessera
