// Parameters on a GPU: their first values, updates and norm, bit for bit those of the CPU.
#include "tests/support/gpu.h"

#include <limits>

#include "nn/layers.h"
#include "optim/cuda/step_state.h"
#include "optim/grad_norm.h"
#include "tensor/ops/embedding.h"
#include "tests/support/errors.h"
#include "tests/support/tensors.h"
#include "tests/support/units.h"

namespace tessera {
namespace {

using test::fill_normal;
using test::make_unit;
using test::same_bits;
using UnitsGpu = test::OnGpu;

// Muon leaves matrices as they are: what it makes of them are products, whose bits a library decides.
const OptimizerOptions kOptions{.momentum = 0.9,
                                .beta1 = 0.9,
                                .beta2 = 0.95,
                                .eps = 1e-8,
                                .weight_decay = 0.1,
                                .orthogonalise = [](const auto&, const auto&) {}};

// A copy of the part [from, to) of a unit in another arena.
FlatUnit part_of(const FlatUnit& unit, int64_t from, int64_t to, const ArenaPtr& arena) {
  FlatUnit part = unit;
  part.values = Tensor::empty({to - from}, unit.values.dtype(), arena);
  part.grads = Tensor::empty({to - from}, unit.grads.dtype(), arena);
  part.values.copy_from(unit.values.narrow(0, from, to - from));
  part.grads.copy_from(unit.grads.narrow(0, from, to - from));
  for (Slot& slot : part.slots) slot.begin -= from;
  return part;
}

class Draws {
 public:
  explicit Draws(const char* name) : random_(Philox::named(3, name)) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random_.below(static_cast<uint64_t>(n), at_++)); }

 private:
  Philox random_;
  uint64_t at_ = 0;
};

// Gaps between slots must keep their values, so they hold something.
FlatUnit drawn_unit(Draws& draw, DType values, DType grads, uint64_t seed, std::string_view optimizer = "") {
  std::vector<int64_t> sizes;
  for (int64_t slots = 1 + draw.below(6); slots > 0; --slots) sizes.push_back(1 + draw.below(1 + draw.below(3000)));
  FlatUnit unit = make_unit("u", sizes, values, grads, make_arena());
  for (const Slot& slot : unit.slots) slot.parameter->whole_update = optimizer == "muon";
  Tensor gaps = unit.values;
  gaps.fill(7);
  fill_normal(unit, unit.values, seed, 1.0);
  fill_normal(unit, unit.grads, seed + 1, 0.3);
  return unit;
}

void expect_same_steps(const char* name, const FlatUnit& here, const FlatUnit& there, const OptimizerOptions& options,
                       const ArenaPtr& state_there = {}) {
  OptimizerOptions options_there = options;
  options_there.state_arena = state_there;
  const auto expected = make_optimizer(*value_named<OptimizerKind>(kOptimizerNames, name), {here}, options),
             found = make_optimizer(*value_named<OptimizerKind>(kOptimizerNames, name), {there}, options_there);
  for (int t = 0; t < 3; ++t) {
    expected->step(0.01 * (t + 1), 0.7);
    found->step(0.01 * (t + 1), 0.7);
  }
  EXPECT_TRUE(same_bits(there.values, here.values)) << name << " " << here.values.describe();
  EXPECT_TRUE(same_bits(there.grads, here.grads));
  ASSERT_EQ(found->state().size(), expected->state().size());
  for (size_t s = 0; s < expected->state().size(); ++s) {
    EXPECT_EQ(found->state()[s].tensor.arena(), state_there ? state_there : there.values.arena());
    EXPECT_TRUE(same_bits(found->state()[s].tensor, expected->state()[s].tensor)) << expected->state()[s].name;
  }
}

// Whole units, and shards that begin and end inside slots, at any element.
TEST_F(UnitsGpu, UpdatesHaveTheBitsOfTheCpu) {
  Draws draw("updates");
  uint64_t seed = 0;
  for (const char* name : {"sgd", "adam", "adamw", "muon"})
    for (const DType values : test::floating(arena))
      for (const DType grads : test::floating(arena)) {
        const FlatUnit unit = drawn_unit(draw, values, grads, seed += 2, name);
        const int64_t n = unit.values.numel(), from = draw.below(n), to = from + 1 + draw.below(n - from);
        for (const auto& [begin, end] : {std::pair{int64_t{0}, n}, {from, to}})
          expect_same_steps(name, part_of(unit, begin, end, make_arena()), part_of(unit, begin, end, arena), kOptions);
      }
  const FlatUnit unit = drawn_unit(draw, DType::float32, DType::float32, 99);
  OptimizerOptions plain = kOptions;
  plain.momentum = 0;
  expect_same_steps("sgd", part_of(unit, 0, unit.values.numel(), make_arena()),
                    part_of(unit, 0, unit.values.numel(), arena), plain);
}

// State in the host's pinned memory, which grows past what is pinned at once.
TEST_F(UnitsGpu, OffloadedStateHasTheBitsOfTheCpu) {
  Draws draw("offloaded");
  const ArenaPtr pinned = make_pinned_arena();
  for (const char* name : {"sgd", "adamw", "muon"})
    for (const DType values : test::floating(arena)) {
      const FlatUnit unit = drawn_unit(draw, values, DType::float32, 7, name);
      const int64_t n = unit.values.numel();
      expect_same_steps(name, part_of(unit, 0, n, make_arena()), part_of(unit, 0, n, arena), kOptions, pinned);
    }
  EXPECT_EQ(pinned->usage(Category::optimizer).live, 0);
  EXPECT_GT(pinned->usage(Category::optimizer).peak, 0);
  const FlatUnit large = make_unit("large", {3 << 20}, DType::bfloat16, DType::float32, make_arena());
  fill_normal(large, large.values, 1, 1.0);
  fill_normal(large, large.grads, 2, 1.0);
  expect_same_steps("adamw", part_of(large, 0, 3 << 20, make_arena()), part_of(large, 0, 3 << 20, arena), kOptions,
                    pinned);
  EXPECT_GT(pinned->footprint(), 32 << 20);
}

// More slots than the parameters of one launch have room for.
TEST_F(UnitsGpu, UnitsMayHaveAnyNumberOfSlots) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < 150; ++i) sizes.push_back(1 + i % 37);
  const FlatUnit unit = make_unit("u", sizes, DType::bfloat16, DType::float32, make_arena());
  fill_normal(unit, unit.values, 1, 1.0);
  fill_normal(unit, unit.grads, 2, 1.0);
  expect_same_steps("adamw", part_of(unit, 0, unit.values.numel(), make_arena()),
                    part_of(unit, 0, unit.values.numel(), arena), kOptions);
}

TEST_F(UnitsGpu, NormsHaveTheBitsOfTheCpu) {
  Draws draw("norms");
  for (const DType dtype : test::floating(arena)) {
    std::vector<FlatUnit> here, there;
    std::vector<Tensor> grads_here, grads_there;
    for (uint64_t u = 0; u < 70; ++u) {  // more than one launch adds up
      here.push_back(drawn_unit(draw, DType::float32, dtype, 10 * u));
      there.push_back(part_of(here.back(), 0, here.back().values.numel(), arena));
      grads_here.push_back(here.back().grads);
      grads_there.push_back(there.back().grads);
    }
    EXPECT_EQ(sums_of_squares(grads_there).to_vector<double>(), sums_of_squares(grads_here).to_vector<double>())
        << name_of(dtype);
    EXPECT_EQ(grad_norm(there), grad_norm(here));
  }
  const FlatUnit unit = make_unit("u", {700'000}, DType::float32, DType::float32, make_arena());
  fill_normal(unit, unit.grads, 5, 1.0);
  const FlatUnit copy = part_of(unit, 0, 700'000, arena);
  EXPECT_EQ(grad_norm(std::array{copy}), grad_norm(std::array{unit}));
  Tensor grads = copy.grads;
  grads.narrow(0, 699'999, 1).fill(std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isinf(grad_norm(std::array{copy})));
}

TEST_F(UnitsGpu, RunsOfBlockSumsAreAddedInTheirOrder) {
  Draws draw("runs");
  std::vector<double> numbers(12000);
  for (double& x : numbers) x = static_cast<double>(draw.below(1 << 30)) * 1e-7;
  std::vector<BlockRun> runs;
  for (int i = 0; i < 100; ++i) {
    const int64_t times = 1 + draw.below(3), stride = draw.below(3000), count = draw.below(2900);
    runs.push_back({.begin = draw.below(3000), .count = count, .times = times, .stride = stride});
  }
  const Tensor here = Tensor::of<double>(numbers, {12000}, make_arena());
  const auto sums = [&](const Tensor& x) {
    const Tensor out = x.make({static_cast<int64_t>(runs.size())}, DType::float64);
    ordered_sums(x, runs, out);
    return out.to_vector<double>();
  };
  EXPECT_EQ(sums(here.to(arena)), sums(here));
}

// Numbers that the GPU finds make the update that the host would have made with them; found wanting, they make none.
TEST_F(UnitsGpu, UpdatesTakeTheirNumbersFromMemory) {
  if constexpr (kWithCuda)
    for (const char* name : {"sgd", "adam", "adamw", "muon"})
      for (const DType values : test::floating(arena)) {
        Draws draw(name);
        const FlatUnit unit = drawn_unit(draw, values, DType::float32, 7, name);
        const FlatUnit here = part_of(unit, 0, unit.values.numel(), arena),
                       there = part_of(unit, 0, unit.values.numel(), arena);
        const auto known = make_optimizer(*value_named<OptimizerKind>(kOptimizerNames, name), {here}, kOptions),
                   queued = make_optimizer(*value_named<OptimizerKind>(kOptimizerNames, name), {there}, kOptions);
        cuda::StepState state(arena);
        const auto step = [&](double lr, double loss) {
          Tensor sum = Tensor::empty({}, DType::float64, arena);
          sum.fill(loss);
          state.set(4, queued->next(lr));
          state.fetch();
          state.close(state.parts(sum, cuda::sums_of_squares(std::array{there.grads}), {}), 0.5);
          queued->queue_step(state.update());
          state.give_back();
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
        step(1, std::numeric_limits<double>::infinity());  // neither then
        EXPECT_TRUE(state.found().update.skip);
        there.grads.narrow(0, 5, 1).fill(std::numeric_limits<double>::quiet_NaN());
        step(1, 2.5);  // nor then
        EXPECT_TRUE(state.found().update.skip);
        EXPECT_TRUE(same_bits(here.values, there.values)) << name << " " << name_of(values);
        for (size_t s = 0; s < known->state().size(); ++s)
          EXPECT_TRUE(same_bits(queued->state()[s].tensor, known->state()[s].tensor)) << known->state()[s].name;
        EXPECT_EQ(queued->steps(), 3);
      }
}

// An id outside its table is complained of by the host's next wait; until then nothing is updated.
TEST_F(UnitsGpu, NothingIsUpdatedAfterAnIndexOutside) {
  if constexpr (kWithCuda) {
    const FlatUnit unit = make_unit("u", {50}, DType::float32, DType::float32, arena);
    unit.grads.narrow(0, 0, 50).fill(1);
    const Tensor loss = Tensor::zeros({}, DType::float64, arena), ids = Tensor::range(3, arena),
                 table = Tensor::zeros({2, 4}, DType::float32, arena);
    cuda::StepState state(arena);
    state.set(0, {});
    state.fetch();
    embedding(ids, table);
    state.close(state.parts(loss, cuda::sums_of_squares(std::array{unit.grads}), {}), 0);
    state.give_back();
    EXPECT_EQ(error_of([&] { unit.values.on_host(); }), "[embedding] id 2 at position 2 is outside [0, 2)");
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

// Whole, and the rows and columns of a part.
TEST_F(UnitsGpu, FirstValuesHaveTheBitsOfTheCpu) {
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
        EXPECT_TRUE(same_bits(there.units()[u].values, here.units()[u].values)) << here.units()[u].name;
        EXPECT_TRUE(same_bits(there.units()[u].grads, here.units()[u].grads));
      }
      for (size_t p = 0; p < here.parameters().size(); ++p)
        EXPECT_TRUE(same_bits(there.parameters()[p]->var.value(), here.parameters()[p]->var.value()));
    }
  EXPECT_EQ(arena->host()->total().live, 0);
}

}  // namespace
}  // namespace tessera
