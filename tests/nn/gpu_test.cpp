// Parameters on a GPU: initial values, updates and norm are bitwise identical to the CPU's; and both layers of an Mlp
// compared with float64 on the CPU, including fused bias gradients.
#include "tests/support/gpu.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "nn/layers.h"
#include "optim/cuda/step_state.h"
#include "optim/grad_norm.h"
#include "tensor/kernels.h"
#include "tensor/ops/embedding.h"
#include "tests/support/draw.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/units.h"

namespace tessera {
namespace {

using namespace test;

using UnitsGpu = test::OnGpu;

// Muon's matrices are excluded: their updates use GEMMs, whose rounding depends on the library.
const OptimizerOptions kOptions{.momentum = 0.9,
                                .beta1 = 0.9,
                                .beta2 = 0.95,
                                .eps = 1e-8,
                                .weight_decay = 0.1,
                                .orthogonalise = [](const auto&, const auto&) {}};

// A copy of the shard [from, to) of a unit in another arena.
FlatUnit slice_unit(const FlatUnit& unit, int64_t from, int64_t to, const ArenaPtr& arena) {
  FlatUnit part = unit;
  part.values = Tensor::empty({to - from}, unit.values.dtype(), arena);
  part.grads = Tensor::empty({to - from}, unit.grads.dtype(), arena);
  part.values.copy_from(unit.values.narrow(0, from, to - from));
  part.grads.copy_from(unit.grads.narrow(0, from, to - from));
  for (Slot& slot : part.slots) slot.begin -= from;
  return part;
}

FlatUnit normal_unit(const std::vector<int64_t>& sizes) {
  const FlatUnit unit = make_unit("u", sizes, DType::bfloat16, DType::float32, make_arena());
  fill_normal(unit, unit.values, 1, 1.0);
  fill_normal(unit, unit.grads, 2, 1.0);
  return unit;
}

// Gaps between slots must be preserved, so they are nonzero.
FlatUnit random_unit(test::Sampler& sample, DType values, DType grads, uint64_t seed, std::string_view optimizer = "") {
  std::vector<int64_t> sizes;
  for (int64_t slots = sample.between(1, 6); slots > 0; --slots)
    sizes.push_back(sample.between(1, sample.between(1, 3000)));
  FlatUnit unit = make_unit("u", sizes, values, grads, make_arena());
  for (const Slot& slot : unit.slots) slot.parameter->full_matrix_update = optimizer == "muon";
  Tensor gaps = unit.values;
  gaps.fill(7);
  fill_normal(unit, unit.values, seed, 1.0);
  fill_normal(unit, unit.grads, seed + 1, 0.3);
  return unit;
}

FlatUnit copy_unit(const FlatUnit& unit, const ArenaPtr& arena) {
  return slice_unit(unit, 0, unit.values.numel(), arena);
}

std::unique_ptr<Optimizer> made_optimizer(std::string_view name, const FlatUnit& unit,
                                          const OptimizerOptions& options) {
  return make_optimizer(*value_named<OptimizerKind>(kOptimizerNames, name), {unit}, options);
}

// Expects equal steps of a unit on the host and of its copy in `arena`.
void expect_same_steps(std::string_view name, const FlatUnit& unit, const ArenaPtr& arena,
                       const OptimizerOptions& options = kOptions, const ArenaPtr& state_there = {}) {
  const FlatUnit here = copy_unit(unit, make_arena()), there = copy_unit(unit, arena);
  OptimizerOptions options_there = options;
  options_there.state_arena = state_there;
  const auto expected = made_optimizer(name, here, options), found = made_optimizer(name, there, options_there);
  for (int t = 0; t < 3; ++t) {
    expected->step(0.01 * (t + 1), 0.7);
    found->step(0.01 * (t + 1), 0.7);
  }
  EXPECT_TRUE(bitwise_equal(there.values, here.values)) << name << " " << here.values.describe();
  EXPECT_TRUE(bitwise_equal(there.grads, here.grads));
  ASSERT_EQ(found->state().size(), expected->state().size());
  for (size_t s = 0; s < expected->state().size(); ++s) {
    EXPECT_EQ(found->state()[s].tensor.arena(), state_there ? state_there : there.values.arena());
    EXPECT_TRUE(bitwise_equal(found->state()[s].tensor, expected->state()[s].tensor)) << expected->state()[s].name;
  }
}

// Full units, and shards that begin and end inside slots, at any element.
TEST_F(UnitsGpu, UpdatesAreBitwiseEqualToCpu) {
  test::Sampler sample("updates", 0);
  uint64_t seed = 0;
  for (const std::string_view name : kOptimizerNames)
    for (const DType values : test::floating(arena))
      for (const DType grads : test::floating(arena)) {
        if ((values == DType::float64) != (grads == DType::float64)) continue;  // unsupported by all optimizers
        const FlatUnit unit = random_unit(sample, values, grads, seed += 2, name);
        const int64_t n = unit.values.numel(), from = sample.between(0, n - 1), to = sample.between(from + 1, n);
        expect_same_steps(name, unit, arena);
        expect_same_steps(name, slice_unit(unit, from, to, make_arena()), arena);
      }
  OptimizerOptions plain = kOptions;
  plain.momentum = 0;
  expect_same_steps("sgd", random_unit(sample, DType::float32, DType::float32, 99), arena, plain);
}

// State in pinned host memory that exceeds one pinned block.
TEST_F(UnitsGpu, OffloadedStateIsBitwiseEqualToCpu) {
  test::Sampler sample("offloaded", 0);
  const ArenaPtr pinned = make_pinned_arena();
  for (const char* name : {"sgd", "adamw", "muon"})
    for (const DType values : test::floating(arena))
      expect_same_steps(name, random_unit(sample, values, accum_dtype(values), 7, name), arena, kOptions, pinned);
  EXPECT_EQ(pinned->usage(Category::optimizer).live, 0);
  EXPECT_GT(pinned->usage(Category::optimizer).peak, 0);
  expect_same_steps("adamw", normal_unit({3 << 20}), arena, kOptions, pinned);
  EXPECT_GT(pinned->footprint(), 32 << 20);
}

// More slots than fit in the parameters of one launch.
TEST_F(UnitsGpu, UpdatesSupportAnyNumberOfSlots) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < 150; ++i) sizes.push_back(1 + i % 37);
  expect_same_steps("adamw", normal_unit(sizes), arena);
}

TEST_F(UnitsGpu, NormsAreBitwiseEqualToCpu) {
  test::Sampler sample("norms", 0);
  for (const DType dtype : test::floating(arena)) {
    std::vector<FlatUnit> here, there;
    std::vector<Tensor> grads_here, grads_there;
    for (uint64_t u = 0; u < 70; ++u) {  // more than one launch sums
      here.push_back(random_unit(sample, DType::float32, dtype, 10 * u));
      there.push_back(copy_unit(here.back(), arena));
      grads_here.push_back(here.back().grads);
      grads_there.push_back(there.back().grads);
    }
    EXPECT_EQ(sums_of_squares(grads_there).to_vector<double>(), sums_of_squares(grads_here).to_vector<double>())
        << to_string(dtype);
    EXPECT_EQ(grad_norm(there), grad_norm(here));
  }
  const FlatUnit unit = make_unit("u", {700'000}, DType::float32, DType::float32, make_arena());
  fill_normal(unit, unit.grads, 5, 1.0);
  const FlatUnit copy = copy_unit(unit, arena);
  EXPECT_EQ(grad_norm(std::array{copy}), grad_norm(std::array{unit}));
  Tensor grads = copy.grads;
  grads.narrow(0, 699'999, 1).fill(std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isinf(grad_norm(std::array{copy})));
}

TEST_F(UnitsGpu, BlockSumsAreAddedInOrder) {
  test::Sampler sample("runs", 0);
  const Tensor here = made({12000}, DType::float64, make_arena(),
                           [&](size_t) { return static_cast<double>(sample.between(0, (1 << 30) - 1)) * 1e-7; });
  std::vector<BlockRun> runs;
  for (int i = 0; i < 100; ++i) {
    const int64_t times = sample.between(1, 3), stride = sample.between(0, 2999), count = sample.between(0, 2899);
    runs.push_back({.begin = sample.between(0, 2999), .count = count, .times = times, .stride = stride});
  }
  const auto sums = [&](const Tensor& x) {
    const Tensor out = x.make({static_cast<int64_t>(runs.size())}, DType::float64);
    ordered_sums(x, runs, out);
    return out.to_vector<double>();
  };
  EXPECT_EQ(sums(here.to(arena)), sums(here));
}

// Scalars computed on the GPU produce the same update as on the host; if they are not finite, there is no update.
TEST_F(UnitsGpu, UpdatesReadScalarsFromDeviceMemory) {
  if constexpr (kWithCuda)
    for (const std::string_view name : kOptimizerNames)
      for (const DType values : test::floating(arena)) {
        test::Sampler sample(std::string(name).c_str(), 0);
        const FlatUnit unit = random_unit(sample, values, accum_dtype(values), 7, name);
        const FlatUnit here = copy_unit(unit, arena), there = copy_unit(unit, arena);
        const auto known = made_optimizer(name, here, kOptions), queued = made_optimizer(name, there, kOptions);
        cuda::StepState state(arena);
        const auto step = [&](double lr, double loss) {
          Tensor sum = Tensor::empty({}, DType::float64, arena);
          sum.fill(loss);
          state.set(4, queued->next(lr));
          state.fetch();
          state.close(state.contributions(sum, cuda::sums_of_squares(std::array{there.grads}), {}), 0.5);
          queued->queue_step(state.update());
          state.copy_back();
          there.values.on_host();
        };
        for (int t = 0; t < 3; ++t) {
          const double norm = grad_norm(std::array{here}), factor = clip_factor(norm, 0.5);
          EXPECT_LT(factor, 1);
          known->step(0.01 * (t + 1), factor);
          step(0.01 * (t + 1), 2.5);
          queued->count_step();
          EXPECT_EQ(state.found().grad_norm, norm);
          EXPECT_EQ(state.found().update.grad_scale, factor);
          EXPECT_EQ(state.found().loss_sum, 2.5);
          EXPECT_FALSE(state.found().update.skip);
        }
        step(1, std::numeric_limits<double>::infinity());  // no update
        EXPECT_TRUE(state.found().update.skip);
        there.grads.narrow(0, 5, 1).fill(std::numeric_limits<double>::quiet_NaN());
        step(1, 2.5);  // no update
        EXPECT_TRUE(state.found().update.skip);
        EXPECT_TRUE(bitwise_equal(here.values, there.values)) << name << " " << to_string(values);
        for (size_t s = 0; s < known->state().size(); ++s)
          EXPECT_TRUE(bitwise_equal(queued->state()[s].tensor, known->state()[s].tensor)) << known->state()[s].name;
        EXPECT_EQ(queued->steps(), 3);
      }
}

// The next host synchronization reports an id out of bounds; until then nothing is updated.
TEST_F(UnitsGpu, IndexOutOfBoundsSkipsUpdate) {
  if constexpr (kWithCuda) {
    const FlatUnit unit = make_unit("u", {50}, DType::float32, DType::float32, arena);
    unit.grads.narrow(0, 0, 50).fill(1);
    const Tensor loss = Tensor::zeros({}, DType::float64, arena), ids = Tensor::range(3, arena),
                 table = Tensor::zeros({2, 4}, DType::float32, arena);
    cuda::StepState state(arena);
    state.set(0, {});
    state.fetch();
    embedding(ids, table);
    state.close(state.contributions(loss, cuda::sums_of_squares(std::array{unit.grads}), {}), 0);
    state.copy_back();
    EXPECT_EQ(error_message([&] { unit.values.on_host(); }), "[embedding] id 2 at position 2 is outside [0, 2)");
    EXPECT_TRUE(state.found().update.skip);
  }
}

struct Layers final : Module {
  Layers()
      : first(child<Linear>("first", 37, 129, Linear::Options{})),
        second(child<Linear>("second", 129, 5, Linear::Options{.bias = false, .deviation = 0.3})) {
    first.make_unit();
  }
  Linear &first, &second;
};

// Full parameters, and shards of rows and of columns.
TEST_F(UnitsGpu, InitialValuesAreBitwiseEqualToCpu) {
  for (const DType dtype : test::floating(arena))
    for (const bool cut : {false, true}) {
      Layers here, there;
      for (Layers* model : {&here, &there})
        if (cut) {
          model->first.shard(model->first.weight, {.runs = {{3, 20}, {60, 11}}});
          model->second.shard(model->second.weight, {.dim = 1, .runs = {{1, 64}}});
        }
      here.materialize(5, make_arena(), dtype, DType::float32);
      there.materialize(5, arena, dtype, DType::float32);
      ASSERT_EQ(there.units().size(), here.units().size());
      for (size_t u = 0; u < here.units().size(); ++u) {
        EXPECT_TRUE(bitwise_equal(there.units()[u].values, here.units()[u].values)) << here.units()[u].name;
        EXPECT_TRUE(bitwise_equal(there.units()[u].grads, here.units()[u].grads));
      }
      for (size_t p = 0; p < here.parameters().size(); ++p)
        EXPECT_TRUE(bitwise_equal(there.parameters()[p]->var.value(), here.parameters()[p]->var.value()));
    }
  EXPECT_EQ(arena->host()->total().live, 0);
}

// Both layers of an Mlp on a GPU: outputs and gradients compared with float64 on the CPU, including fused bias
// gradients.

using GeluMlpGpu = test::OnGpu;

struct Mode {
  bool deferred, recompute, frozen;  // frozen: the first layer's weight, but not its bias
};

// Output and gradients for values exact in `dtype`, computed in `as`.
std::vector<Tensor> results(DType dtype, DType as, const ArenaPtr& arena, const Mode& mode) {
  const auto random_tensor = [&](const Shape& shape, size_t i) {
    return test::random_tensor(shape, dtype, "mlp " + std::to_string(i)).to(as).to(arena);
  };
  std::vector<Var> v;
  for (const Shape& shape : {Shape{2, 16, 16}, Shape{40, 16}, Shape{40}, Shape{24, 40}, Shape{24}})
    v.emplace_back(random_tensor(shape, v.size()), !(mode.frozen && v.size() == 1));
  const Var y = mlp(v[0], {.w = v[1], .b = v[2]}, {.w = v[3], .b = v[4]}, {.recompute = mode.recompute});
  DeferredWeightGrads later;
  backward(y, {.seed = random_tensor({2, 16, 24}, 9), .defer = mode.deferred ? &later : nullptr});
  later.run();
  std::vector<Tensor> all{y.value()};
  for (const Var& one : v)
    if (one.requires_grad()) all.push_back(one.grad());
  return all;
}

TEST_F(GeluMlpGpu, GradientsMatchFloat64) {
  for (const DType dtype : {DType::float32, DType::bfloat16})
    for (const bool deferred : {false, true})
      for (const bool recompute : {false, true})
        for (const bool frozen : {false, true}) {
          const Mode mode{deferred, recompute, frozen};
          const auto found = results(dtype, dtype, arena, mode),
                     exact = results(dtype, DType::float64, make_arena(), mode);
          ASSERT_EQ(found.size(), frozen ? 5U : 6U);
          for (size_t i = 0; i < found.size(); ++i)
            EXPECT_LE(apart(found[i], exact[i]), dtype == DType::bfloat16 ? 0.02 : 2e-6)
                << i << " " << to_string(dtype) << (deferred ? " deferred" : "") << (recompute ? " recompute" : "")
                << (frozen ? " frozen" : "");
        }
}

// The emulated library supports every fused epilogue; on a GPU timing decides.
TEST_F(GeluMlpGpu, WeightGradientsIncludeBothBiases) {
  if (!test::emulated()) GTEST_SKIP() << "timing decides";
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
