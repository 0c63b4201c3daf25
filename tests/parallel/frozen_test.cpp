// Frozen parameters: they keep their bits, and nobody holds a gradient or a state of them, sends or counts anything of
// them; the others train as on one rank.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "optim/optimizer.h"
#include "parallel/comm/launch.h"
#include "tests/parallel/tiny_gpt.h"
#include "tests/support/strategy.h"

namespace tessera {
namespace {

constexpr uint64_t kSeed = 5;
constexpr int kRanks = 2;
constexpr int64_t kSteps = 3;

struct Plan {
  DataOptions data = {};
  Recompute recompute = Recompute::none;
  bool table = false;  // the token table is frozen too, so that nothing below the second block wants a gradient
};

// An embedding or both, all of one block, and of the other what is no matrix of its MLP: a unit of which a part trains.
Decoder& freeze(Decoder& model, const Plan& plan) {
  DecoderBlock& second = *model.blocks[1];
  for (Module* module :
       std::vector<Module*>{model.positions, model.blocks[0], &second.norm1, &second.attn, &second.norm2})
    module->freeze();
  if (plan.table) model.tokens.freeze();
  return model;
}

struct Sizes {
  int64_t all = 0, trained = 0, padded = 0, padded_trained = 0;  // elements of units; padded for ZeRO
};

Sizes sizes_of(Decoder& model) {
  Sizes out;
  for (const Module::Unit& unit : model.layout()) {
    const int64_t padded = shard_size(unit.size, kRanks) * kRanks;
    out.all += unit.size;
    out.padded += padded;
    if (!unit.trainable) continue;
    out.trained += unit.size;
    out.padded_trained += padded;
  }
  return out;
}

struct Trained {
  std::vector<double> losses, norms;
  std::vector<std::vector<std::byte>> first, last;   // bytes of each parameter, in the order of parameters()
  int64_t gradients = 0, state = 0, parameters = 0;  // bytes
  OpCounts counts{};
};

ModelConfig config_of(Recompute recompute) {
  ModelConfig config = test::tiny_gpt(0.1);
  config.recompute = recompute;
  return config;
}

// All parameters whole, whatever the strategy holds between steps.
std::vector<std::vector<std::byte>> values_of(Decoder& model, const DataStrategy& strategy) {
  std::vector<std::vector<std::byte>> out;
  const std::vector<Module::Unit> layout = model.layout();
  for (size_t u = 0; u < layout.size(); ++u) {
    const bool none = strategy.shards().empty();  // DataParallel keeps nothing on this rank
    const Tensor whole =
        gather_unit(strategy.axis(), strategy.layout(), u, none ? Tensor() : strategy.shards()[u].values);
    for (const Slot& slot : layout[u].slots)
      if (whole.defined()) out.push_back(test::bytes(whole.narrow(0, slot.begin, slot.size)));
  }
  return out;
}

test::Sequences loaded(const ModelConfig& config, int64_t step, const std::vector<BatchSlice>& slices,
                       const ArenaPtr& arena) {
  const Tensor none = Tensor::meta({2, config.context}, DType::int32);
  if (slices.empty()) return {none, none};
  return test::sequences(config, step, slices[0].first, 2 * static_cast<int64_t>(slices.size()), arena);
}

Trained train(const Plan& plan) {
  Trained out;
  launch({.ranks = kRanks, .threads_per_rank = 1, .timeout_s = 60}, [&](Communicator& world) {
    const ArenaPtr arena = make_arena();
    Decoder model(config_of(plan.recompute));
    const auto strategy = make_data_strategy(freeze(model, plan), world, arena, plan.data);
    const auto optimizer = make_optimizer(OptimizerKind::adamw, strategy->shards(), {.weight_decay = 0.1});
    Trained run;
    run.first = values_of(model, *strategy);
    world.reset_counts();
    for (int64_t step = 0; step < kSteps; ++step) {
      strategy->begin_step();
      model.set_step({.seed = kSeed, .step = step, .first_sequence = 2 * world.rank(), .training = true});
      const test::Sequences s = loaded(model.config, step, strategy->batches().loads(4, 1, 0), arena);
      const double loss = test::run_microbatch(*strategy, model, s.ids, s.targets, 1.0 / 40, 0);
      strategy->finish_gradients();
      if (step == 0) run.counts = world.counts();
      run.losses.push_back(world.sum(loss));
      run.norms.push_back(std::sqrt(test::sum_of_squares(*strategy)));
      optimizer->step(0.01, clip_factor(run.norms.back(), 1));
      strategy->share_parameters();
    }
    run.gradients = arena->usage(Category::gradients).live;
    run.state = arena->usage(Category::optimizer).live;
    run.parameters = arena->usage(Category::parameters).live;
    run.last = values_of(model, *strategy);
    if (world.rank() == 0) out = run;
  });
  return out;
}

// The same on one rank that adds as two would.
Trained reference(const Plan& plan) {
  Trained out;
  launch({.ranks = 1, .threads_per_rank = 1}, [&](Communicator&) {
    const ArenaPtr arena = make_arena();
    Decoder model(config_of(plan.recompute));
    const std::vector<FlatUnit>& units = freeze(model, plan).materialize(kSeed, arena, DType::float32, DType::float32);
    const auto optimizer = make_optimizer(OptimizerKind::adamw, units, {.weight_decay = 0.1});
    for (int64_t step = 0; step < kSteps; ++step) {
      double loss = 0;
      model.clear_gradients();
      for (int64_t first : {0, 2})
        loss += test::learn(model, test::sequences(model.config, step, first, 2, arena),
                            {.seed = kSeed, .step = step, .first_sequence = first, .training = true}, 40);
      model.zero_missing_gradients();
      out.losses.push_back(loss);
      out.norms.push_back(grad_norm(units));
      optimizer->step(0.01, clip_factor(out.norms.back(), 1));
    }
    for (const FlatUnit& unit : units)
      for (const Slot& slot : unit.slots) out.last.push_back(test::bytes(unit.values.narrow(0, slot.begin, slot.size)));
    EXPECT_EQ(arena->usage(Category::gradients).live, 4 * sizes_of(model).trained);
  });
  return out;
}

std::vector<bool> trainable(const Plan& plan) {
  std::vector<bool> out;
  Decoder model(config_of(plan.recompute));
  for (const Module::Unit& unit : freeze(model, plan).layout())
    for (const Slot& slot : unit.slots) out.push_back(slot.parameter->trainable);
  return out;
}

void expect_frozen(const Plan& plan, const Trained& expected) {
  const std::string what =
      fmt::format("{}, zero {}, table {}", name_in(kDataModeNames, plan.data.mode), plan.data.zero, plan.table);
  const Trained run = train(plan);
  const std::vector<bool> trains = trainable(plan);
  ASSERT_EQ(run.last.size(), trains.size()) << what;
  int64_t frozen = 0;
  for (size_t p = 0; p < trains.size(); ++p) {
    EXPECT_EQ(run.first[p] != run.last[p], trains[p]) << what << ", parameter " << p;
    frozen += trains[p] ? 0 : 1;
  }
  EXPECT_EQ(frozen, plan.table ? 22 : 21) << what;  // the positions, a block's twelve, the other's norms and attention
  EXPECT_EQ(run.losses, expected.losses) << what;
  EXPECT_EQ(run.norms, expected.norms) << what;
  EXPECT_TRUE(run.last == expected.last) << what;
}

TEST(Frozen, KeepTheirBitsAndTheOthersTrainAsOnOneRank) {
  for (const Recompute recompute : {Recompute::none, Recompute::block})
    for (const bool table : {false, true}) {
      Plan plan{.recompute = recompute, .table = table};
      const Trained expected = reference(plan);
      for (int zero = 0; zero <= 3; ++zero) {
        plan.data = {.zero = zero, .seed = kSeed};
        expect_frozen(plan, expected);
      }
      for (const DataMode mode : {DataMode::dataparallel, DataMode::ps_sync}) {
        plan.data = {.mode = mode, .seed = kSeed};
        expect_frozen(plan, expected);
      }
    }
}

TEST(Frozen, HaveNoGradientNoStateAndSendNothing) {
  Decoder model(config_of(Recompute::none));
  const Sizes n = sizes_of(freeze(model, {}));
  ASSERT_LT(n.trained, n.all);
  for (int zero = 0; zero <= 3; ++zero) {
    const Trained run = train({.data = {.zero = zero, .seed = kSeed}});
    const int64_t whole = 4 * (zero > 0 ? n.padded_trained : n.trained), piece = 4 * n.padded_trained / kRanks;
    EXPECT_EQ(run.gradients, zero >= 2 ? piece : whole) << zero;
    EXPECT_EQ(run.state, 2 * (zero >= 1 ? piece : whole)) << zero;
    EXPECT_EQ(run.parameters, 4 * (zero == 3 ? n.padded / kRanks : zero > 0 ? n.padded : n.all)) << zero;
    const OpCount& sums = run.counts[static_cast<size_t>(zero == 0 ? Op::all_reduce : Op::reduce_scatter)];
    EXPECT_EQ(sums.sent, zero == 0 ? whole : whole / 2) << zero;  // bytes that one of two ranks sends
  }
}

TEST(Frozen, AfterMemoryItIsTooLate) {
  Decoder model(config_of(Recompute::none));
  model.materialize(kSeed, make_arena(), DType::float32, DType::float32);
  EXPECT_THROW(model.norm.freeze(), Error);
}

}  // namespace
}  // namespace tessera
